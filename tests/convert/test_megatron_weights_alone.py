"""State of the optimizer that is not wanted, cannot be read, or is left out: what is said of it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from megads.config.model import ModelConfig
from megads.convert.megatron.args import write_args
from megads.convert.run import open_checked
from megads.convert.source import ReadOptions, Source
from megads.errors import CheckpointError
from tests.convert.megatron_cases import FILE, assert_same, canonical, core_name, random_tensors
from tests.convert.test_megatron_optimizer import MODEL, MOMENTS, prepare, write_buffers

ALONE = ReadOptions(optimizer=False)


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def check_weights_alone(source: Source, masters: dict[str, Tensor], match: str) -> None:
    """The model's own weights, and a note that says why."""
    assert source.kinds == ("param",) and source.precision is None
    assert_same(canonical(source), halves(masters))
    (note,) = source.notes
    assert "those the model computed with" in note and match in note


def test_masters_are_weights_without_moments_too(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 2, 1)
    for rank in range(2):
        write_buffers(made, 0, rank, None, "together", bf16=True)
    source = open_checked(made.folder, "auto", ALONE)
    assert source.kinds == ("param",) and source.precision == torch.bfloat16
    assert_same(canonical(source), made.masters)
    assert ["fp32 masters" in note for note in source.notes] == [True]


def test_buffers_that_cannot_be_read(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 1, 1)
    write_buffers(made, 0, 0, None, "together")
    path = made.path(0, 0, "distrib_optim.pt")
    content = torch.load(path)
    (flat,) = content[0].values()
    for match, change in (
        ("should be the master weights", lambda elements: elements.roll(1)),
        ("another layout", lambda elements: elements[:-1]),
    ):
        changed = {key: change(flat[key]) for key in ("param", *MOMENTS)}
        torch.save({**content, 0: {"buffer": changed}}, path)
        check_weights_alone(open_checked(made.folder, "auto", ALONE), made.masters, match)
    with pytest.raises(CheckpointError, match=r"another layout; --drop-optimizer takes the"):
        open_checked(made.folder, "auto", ReadOptions())


def test_groups_that_cannot_be_told_apart(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 1, 1)
    groups = [{"wd_mult": 1.0, "step": 11, "params": [0, 1]}]
    made.save(0, 0, {"optimizer": {"state": {0: {}}, "param_groups": groups}})
    with pytest.raises(CheckpointError, match="--drop-optimizer"):
        open_checked(made.folder, "auto", ReadOptions())
    source = open_checked(made.folder, "auto", ALONE)
    check_weights_alone(source, made.masters, "groups lack")
    assert source.training_state()["optimizer_updates"] == 11


def test_moments_left_out_are_said(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 1, 1)
    assert open_checked(made.folder, "auto", ReadOptions()).notes == ()
    write_buffers(made, 0, 0, None, "together")
    path = made.path(0, 0, "distrib_optim.pt")
    path.unlink()
    (note,) = open_checked(made.folder, "auto", ReadOptions()).notes
    assert f"there is no {path}" in note
    assert open_checked(made.folder, "auto", ALONE).notes == ()
    names = list(made.parts["param"][0][0])
    shapes = made.parts["param"][0][0]
    decayed = [n for n in names if shapes[n].ndim == 2]
    groups = [
        {"wd_mult": 1.0, "params": list(range(len(decayed)))},
        {"wd_mult": 0.0, "params": list(range(len(decayed), len(names)))},
    ]
    state = {i: {"momentum_buffer": torch.zeros(1)} for i in range(len(names))}
    made.save(0, 0, {"optimizer": {"state": state, "param_groups": groups}})
    (note,) = open_checked(made.folder, "auto", ReadOptions()).notes
    assert "is not Adam" in note


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_tensor_that_some_ranks_lack(lacking: int, tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 2, 1)
    content = made.ranks[0][lacking]
    model = dict(content["model"])
    del model["decoder.layers.1.input_layernorm.bias"]
    args = {key: value for key, value in vars(content["args"]).items() if key != "args"}
    path = made.path(0, lacking, FILE)
    new = {**content, "args": argparse.Namespace(**args), "model": model}
    torch.save(new, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.1\.input_layernorm\.bias"):
        open_checked(made.folder, "auto", ReadOptions())


ONE_HEAD = ModelConfig(
    num_layers=2,
    hidden_size=4,
    num_attention_heads=1,
    vocab_size=8,
    vocab_multiple=8,
    max_seq_length=6,
)
"""With a single head, query, key and value rows are in Megatron-LM's order as they are here."""


def torch_dist(folder: Path, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write a checkpoint in bf16 with some of the optimizer's state; its weights in fp32."""
    masters = random_tensors(ONE_HEAD)
    tensors = {core_name(name): tensor.bfloat16() for name, tensor in masters.items()}
    save(tensors | extra, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    args = argparse.Namespace(**write_args(ONE_HEAD), bf16=True)
    torch.save({"args": args, "iteration": 5}, folder / "common.pt")
    return masters


def state_of(kind: str) -> dict[str, Tensor]:
    tensors = random_tensors(ONE_HEAD)
    return {f"optimizer.state.{kind}.{core_name(n)}": tensor for n, tensor in tensors.items()}


def flattened(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.flatten() for name, tensor in state.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_by_parameter(tmp_path: Path) -> None:
    extra = state_of("fp32_param") | state_of("exp_avg") | state_of("exp_avg_sq")
    masters = torch_dist(tmp_path, extra)
    source = open_checked(tmp_path, "auto", ReadOptions())
    assert source.kinds == ("param", *MOMENTS)
    alone = open_checked(tmp_path, "auto", ALONE)
    assert alone.kinds == ("param",) and alone.precision == torch.bfloat16
    assert_same(canonical(alone), masters)
    assert_same(canonical(source, "exp_avg"), masters)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["fp32_param", "exp_avg"])
def test_flattened_state_is_found_as_it_is_opened(kind: str, tmp_path: Path) -> None:
    extra: dict[str, Any] = {k: state_of(k) for k in ("fp32_param", "exp_avg", "exp_avg_sq")}
    extra[kind] = flattened(extra[kind])
    masters = torch_dist(tmp_path, {n: t for state in extra.values() for n, t in state.items()})
    match = rf"optimizer\.state\.{kind}\.embedding\.word\S+ has shape \(32,\), .*--drop-optimizer"
    with pytest.raises(CheckpointError, match=match) as error:
        open_checked(tmp_path, "auto", ReadOptions())
    assert str(tmp_path) in str(error.value) and "(8, 4)" in str(error.value)
    source = open_checked(tmp_path, "auto", ALONE)
    if kind == "fp32_param":
        check_weights_alone(source, masters, "flattened")
    else:
        assert source.kinds == ("param",)
        assert_same(canonical(source), masters)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flat_buckets_are_said_to_be_left_out(tmp_path: Path) -> None:
    buckets = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.zeros(64)}
    masters = torch_dist(tmp_path, buckets)
    source = open_checked(tmp_path, "auto", ReadOptions())
    (note,) = source.notes
    assert "moments are left out" in note and "optimizer.distributed." in note
    assert_same(canonical(source), halves(masters))
    assert open_checked(tmp_path, "auto", ALONE).notes == ()
