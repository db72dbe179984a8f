"""Megatron-DeepSpeed in, at every cut of the files: numbers by which each element is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megads.convert.formats import open_source
from megads.convert.pickles import load_pickle
from megads.convert.run import open_checked
from megads.convert.source import ReadOptions
from megads.errors import CheckpointError
from tests.convert.deepspeed_cases import (
    BIGSCIENCE,
    DEEPSPEEDAI,
    KINDS,
    Layout,
    canonical,
    namespace,
    stamped,
    write_checkpoint,
)
from tests.convert.deepspeed_models import BLOOM, LLAMA, THIRDS, model_of, same, written


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 4, 1), (4, 1, 4)])
def test_all_elements_land_where_they_belong(tmp_path: Path, tp: int, pp: int, dp: int) -> None:
    """Failures 15, 17, 20 and 21: layer numbers, vocabulary and partition padding, tied moments."""
    layout = Layout(tp, pp, dp, vocab_multiple=8, tied_on_last=True)
    written(tmp_path / "bloom", BIGSCIENCE, BLOOM, layout)
    source = open_checked(tmp_path / "bloom", "auto", ReadOptions())
    assert source.format == "megatron-deepspeed" and source.kinds == KINDS
    for _ in range(3):
        same(source, model_of(BLOOM))
    assert source.training_state()["optimizer_updates"] == 4


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_partitions_of_odd_parameters(tmp_path: Path, dp: int) -> None:
    """Failure 20; a plain walk through the partitions does meet the padding."""
    args = BLOOM | {"hidden_size": 7, "num_attention_heads": 1, "ffn_hidden_size": 5}
    step = written(tmp_path / "odd", BIGSCIENCE, args, Layout(dp=dp, vocab_multiple=1))
    same(open_checked(tmp_path / "odd", "auto", ReadOptions()), model_of(args))
    files = sorted(step.glob("zero_*"))
    states = [load_pickle(file)["optimizer_state_dict"] for file in files]
    flat = torch.cat([t for state in states for t in state["single_partition_of_fp32_groups"]])
    assert len(files) == dp and bool((flat[flat < 0] == -777.0).any())


def test_files_without_addresses_are_read_by_the_shapes(tmp_path: Path) -> None:
    written(tmp_path / "old", BIGSCIENCE, BLOOM, Layout(2, 2, 3, slices=False, vocab_multiple=8))
    same(open_checked(tmp_path / "old", "auto", ReadOptions()), model_of(BLOOM))


def test_without_the_optimizer_weights_are_those_of_the_layers(tmp_path: Path) -> None:
    written(tmp_path / "bare", BIGSCIENCE, BLOOM, Layout(2, optimizer=False))
    source = open_checked(tmp_path / "bare", "auto", ReadOptions())
    assert source.kinds == ("param",)
    assert all(torch.equal(t, canonical(source)[n]) for n, t in stamped(model_of(BLOOM)).items())


@pytest.mark.parametrize("heads, groups", [(4, 1), (4, 2), (6, 2), (6, 3), (8, 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_grouped_heads(tmp_path: Path, heads: int, groups: int, tp: int) -> None:
    """Failures 10, 12 and 13: weights and biases, q, k, v of each head known by a code."""
    args = LLAMA | {"hidden_size": heads * 8, "num_attention_heads": heads}
    args |= {"num_key_value_heads": groups}
    model = model_of(args)
    codes = [*range(100, 100 + heads), *range(200, 200 + groups), *range(300, 300 + groups)]
    canonical_rows = torch.tensor(codes, dtype=torch.float32).repeat_interleave(8)
    stored: list[int] = []
    for group in range(groups):
        each = heads // groups
        stored += [100 + group * each + i for i in range(each)] + [200 + group, 300 + group]
    file_rows = torch.tensor(stored, dtype=torch.float32).repeat_interleave(8)
    step = written(tmp_path / "gqa", DEEPSPEEDAI, args, Layout(tp, optimizer=False))
    for rank in range(tp):
        path = step / f"layer_02-model_{rank:02d}-model_states.pt"
        content = torch.load(path)
        mine = file_rows.chunk(tp)[rank]
        content["self_attention.query_key_value.weight"] = mine[:, None].repeat(1, heads * 8)
        content["self_attention.query_key_value.bias"] = mine
        torch.save(content, path)
    source = open_source(tmp_path / "gqa")
    weight = source.tensor("param", "blocks.0.attn.qkv.weight")
    assert torch.equal(weight, canonical_rows[:, None].repeat(1, model.hidden_size))
    assert torch.equal(source.tensor("param", "blocks.0.attn.qkv.bias"), canonical_rows)


def test_thirds_and_groups_are_told_apart_by_the_option_only(tmp_path: Path) -> None:
    args = LLAMA | {"num_key_value_heads": 4}
    written(tmp_path / "thirds", THIRDS, args, Layout(2, dp=2))
    written(tmp_path / "grouped", DEEPSPEEDAI, args, Layout(2, dp=2))
    same(open_checked(tmp_path / "thirds", "auto", ReadOptions()), model_of(args))
    same(open_checked(tmp_path / "grouped", "auto", ReadOptions(qkv="grouped")), model_of(args))
    wrong = open_checked(tmp_path / "thirds", "auto", ReadOptions(qkv="grouped"))
    with pytest.raises(AssertionError, match=r"attn\.qkv"):
        same(wrong, model_of(args))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_halves(tmp_path: Path, tp: int) -> None:
    """Failure 16: gates are 1000 and more, ups 2000; the bias too."""
    args = LLAMA | {"num_key_value_heads": 4}
    model = model_of(args)
    rows = torch.cat([torch.arange(1000.0, 1048.0), torch.arange(2000.0, 2048.0)])
    tensors = {kind: stamped(model, kind) for kind in KINDS}
    for kind in KINDS:
        tensors[kind]["blocks.1.mlp.up.weight"] = rows[:, None].repeat(1, 32)
        tensors[kind]["blocks.1.mlp.up.bias"] = rows
    step = written(tmp_path / "gated", DEEPSPEEDAI, args, Layout(tp), tensors)
    file = load_pickle(step / "layer_03-model_00-model_states.pt")
    first = file["mlp.dense_h_to_4h.bias"]
    assert first[: 48 // tp].tolist() == [1000.0 + i for i in range(48 // tp)]
    assert first[48 // tp] == 2000.0
    source = open_checked(tmp_path / "gated", "auto", ReadOptions(qkv="grouped"))
    for kind in KINDS:
        assert torch.equal(source.tensor(kind, "blocks.1.mlp.up.weight")[:, 5], rows)
        assert torch.equal(source.tensor(kind, "blocks.1.mlp.up.bias"), rows)


def test_halves_that_no_rank_can_hold_are_refused(tmp_path: Path) -> None:
    """Failure 16: twice the size can be divided, the size cannot."""
    args = LLAMA | {"num_key_value_heads": 4, "ffn_hidden_size": 3}
    model = model_of(LLAMA | {"num_key_value_heads": 4, "ffn_hidden_size": 4})
    states = namespace(**args, words=101, tensor_model_parallel_size=2)
    step = write_checkpoint(tmp_path, DEEPSPEEDAI, model, Layout(2, optimizer=False), states)
    for rank in (0, 1):
        path = step / f"layer_02-model_{rank:02d}-model_states.pt"
        content = torch.load(path)
        content["mlp.dense_h_to_4h.weight"] = torch.zeros(3, 32)
        torch.save(content, path)
    source = open_source(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"\[3, 3\] rows of mlp.dense_h_to_4h.weight .*halves"
    ):
        source.tensor("param", "blocks.0.mlp.up.weight")


@pytest.mark.parametrize("tp, padded", [(1, 104), (2, 112), (4, 128)])
def test_the_vocabulary_has_its_words_and_no_more(tmp_path: Path, tp: int, padded: int) -> None:
    """Failure 17."""
    written(tmp_path / "vocab", BIGSCIENCE, BLOOM, Layout(tp, vocab_multiple=8))
    for kind in KINDS:
        source = open_source(tmp_path / "vocab")
        words = source.tensor(kind, "embedding.word.weight")
        assert torch.equal(words, stamped(model_of(BLOOM), kind)["embedding.word.weight"])
        kept = open_source(tmp_path / "vocab", options=ReadOptions(keep_padding=True))
        rows = kept.tensor(kind, "embedding.word.weight")
        assert rows.shape == (padded, 8) and torch.equal(rows[:101], words)
        assert bool((rows[101:] == -777.0).all())


def test_deepspeeds_universal_folders(tmp_path: Path) -> None:
    """Whole tensors in another dialect: cut vocabulary, joined halves, thirds rank by rank."""
    args = LLAMA | {"num_key_value_heads": 4}
    model, tp = model_of(args), 2
    step = written(tmp_path / "run", THIRDS, args, Layout(tp, vocab_multiple=8))
    (tmp_path / "run" / "latest").unlink()
    (tmp_path / "run" / "latest_universal").write_text("global_step4_universal")
    folder = tmp_path / "run" / "global_step4_universal"
    folder.mkdir()
    (step / "mp_rank_00_model_states.pt").rename(folder / "mp_rank_00_model_states.pt")
    for path in sorted(step.glob("layer_*model_00*")):
        for key in torch.load(path):
            layer = int(path.name[6:8])
            _write_universal(folder / "zero" / f"{layer}.{key}", step, layer, key, tp)
    for path in step.glob("*"):
        path.unlink()
    source = open_checked(tmp_path / "run", "auto", ReadOptions())
    assert source.path == folder and source.training_state()["optimizer_updates"] == 4
    for name, want in stamped(model).items():
        assert torch.equal(source.tensor("param", name), want), name


def _write_universal(folder: Path, step: Path, layer: int, key: str, tp: int) -> None:
    parts = [
        torch.load(step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")[key]
        for rank in range(tp)
    ]
    entry: dict[str, Any] = {"param": parts[0]}
    rows = ("dense.weight", "dense_4h_to_h.weight")
    if parts[0].dim() > 1 or key.endswith(("query_key_value.bias", "dense_h_to_4h.bias")):
        dim = int(key.endswith(rows))
        entry = {"param": torch.cat(parts, dim), "cat_dim": dim}
    if "dense_h_to_4h" in key:
        halves = [half for part in parts for half in part.chunk(2)]
        entry = {"param": torch.cat(halves[0::2] + halves[1::2]), "cat_dim": 0}
        entry["param_n_sub_params"] = 2
    if "word_embeddings" in key or "lm_head" in key:
        entry |= {"param": entry["param"][:101], "vocab_tensor": True}
    folder.mkdir(parents=True)
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save(entry, folder / f"{name}.pt")
    torch.save(torch.tensor(4.0), folder / "step.pt")
