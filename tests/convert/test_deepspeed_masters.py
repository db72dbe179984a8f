"""What several files of DeepSpeed say of one tensor: copies of the ranks, masters and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megads.convert.deepspeed import files
from megads.convert.deepspeed.files import Opened
from megads.convert.formats import open_source
from megads.convert.run import open_checked
from megads.convert.source import MASTERS_NOTE, ReadOptions
from megads.errors import CheckpointError
from tests.convert.deepspeed_cases import BIGSCIENCE, DEEPSPEEDAI, Dialect, Layout, stamped
from tests.convert.deepspeed_models import BLOOM, LLAMA, model_of, same, written
from tests.convert.neox_models import SETTINGS, WORDS, pythia, rank_files, write_files

WEIGHTS = ReadOptions(optimizer=False)


def change(path: Path, key: str, by: float, dtype: torch.dtype | None = None) -> None:
    content = torch.load(path)
    content[key] = content[key] + by
    torch.save({name: t.to(dtype or t.dtype) for name, t in content.items()}, path)


@pytest.mark.parametrize("dialect, args, block", [(BIGSCIENCE, BLOOM, 3), (DEEPSPEEDAI, LLAMA, 2)])
def test_copies_that_drifted_apart_are_averaged(
    tmp_path: Path, dialect: Dialect, args: dict[str, Any], block: int
) -> None:
    """The larger drift, relative to the values, is the one that is told."""
    step = written(tmp_path, dialect, args, Layout(2, optimizer=False))
    assert open_source(tmp_path).notes == ()
    second = step / f"layer_{block:02d}-model_01-model_states.pt"
    change(second, "input_layernorm.weight", 0.001)
    change(second, "mlp.dense_4h_to_h.bias", 0.25)
    source = open_checked(tmp_path, "auto", ReadOptions())
    assert (
        f"of blocks.0.mlp.down.bias (mlp.dense_4h_to_h.bias of layer {block:d})"
        in (source.notes[-1])
    )
    for name, drift in (("mlp.down.bias", 0.25), ("attn_norm.weight", 0.001), ("attn.out.bias", 0)):
        want = stamped(source.model)[f"blocks.0.{name}"] + drift / 2
        got = source.tensor("param", f"blocks.0.{name}")
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


def test_masters_are_held_against_the_weights(tmp_path: Path) -> None:
    """Failure of stale optimizer files: a weight that is not its master, rounded."""
    args = BLOOM | {"bf16": True, "seq_length": 16, "consumed_train_samples": 32}
    step = written(tmp_path, BIGSCIENCE, args, Layout(2, dp=2))
    for path in sorted(step.glob("layer_*")):
        key = next(iter(torch.load(path)))
        change(path, key, 0.0, torch.bfloat16)
    source = open_checked(tmp_path, "auto", ReadOptions())
    same(source, model_of(BLOOM))
    assert source.precision == torch.bfloat16 and MASTERS_NOTE in source.notes
    assert source.training_state()["train"]["tokens"] == 32 * 16
    change(step / "layer_04-model_01-model_states.pt", "mlp.dense_h_to_4h.weight", 8.0)
    source = open_checked(tmp_path, "auto", ReadOptions())
    source.tensor("param", "blocks.0.mlp.up.weight")
    with pytest.raises(
        CheckpointError,
        match=r"layer_04-model_01.*dense_h_to_4h.weight.*zero_pp_rank_0_mp_rank_01.*bfloat16",
    ):
        source.tensor("param", "blocks.1.mlp.up.weight")


def test_unwanted_moments_do_not_stand_in_the_way(tmp_path: Path) -> None:
    step = written(tmp_path, BIGSCIENCE, BLOOM, Layout(2, dp=2))
    source = open_checked(tmp_path, "auto", WEIGHTS)
    assert source.kinds == ("param",) and source.notes == ()
    for path in step.glob("zero_pp_rank_1_*"):
        path.unlink()
    with pytest.raises(CheckpointError):
        open_checked(tmp_path, "auto", ReadOptions())
    source = open_checked(tmp_path, "auto", WEIGHTS)
    assert "left aside" in source.notes[0]
    for name, want in stamped(source.model).items():
        assert torch.equal(source.tensor("param", name), want)


@pytest.mark.parametrize(
    "said, dtype",
    [
        ({"precision": "bfloat16"}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, torch.bfloat16),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": False}}, None),
        ({"precision": "fp32", "fp16": {"enabled": True}}, None),
    ],
)
def test_neox_says_what_it_computed_in(
    tmp_path: Path, said: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Masters of one partition; without them the type of the weights is that of the files."""
    _, tensors = pythia()
    step = write_files(tmp_path, [rank_files(tensors, 1, 0)], SETTINGS | {"seq-length": 8} | said)
    bare = open_checked(tmp_path, "auto", WORDS)
    assert bare.precision is None and MASTERS_NOTE not in bare.notes
    names = [key for key in tensors if not key.endswith("rotary_emb.inv_freq")]
    held = {
        f"{path.name[6:8].lstrip('0') or '0'}.{key}": tensor
        for path in sorted(step.glob("layer_*"))
        for key, tensor in torch.load(path).items()
    }
    flat = torch.cat([held[name].reshape(-1) for name in names])
    states = torch.load(step / "mp_rank_00_model_states.pt")
    states |= {"param_shapes": [{name: held[name].shape for name in names}], "global_samples": 5}
    torch.save(states, step / "mp_rank_00_model_states.pt")
    torch.save(
        {"optimizer_state_dict": {"single_partition_of_fp32_groups": [flat]}},
        step / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    source = open_checked(tmp_path, "auto", WORDS)
    assert source.precision == dtype and (MASTERS_NOTE in source.notes) == (dtype is not None)
    assert source.training_state()["train"]["tokens"] == 40


def test_a_mixture_of_experts_is_refused_as_such(tmp_path: Path) -> None:
    step = written(tmp_path, BIGSCIENCE, BLOOM, Layout(optimizer=False))
    (step / "layer_3_expert_0_mp_rank_00_model_states.pt").write_bytes(b"")
    for path in (step, tmp_path):
        with pytest.raises(CheckpointError, match="mixture of experts"):
            open_source(path)


def test_files_in_use_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(files, "load_pickle", lambda path: read.append(path.name))
    opened = Opened(limit=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        opened(tmp_path / name)
    assert read == ["a", "b", "c", "b"]
