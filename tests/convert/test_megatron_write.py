"""Megatron-LM's `torch` format written at any layout and read back; stamps for conventions."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.run import check_equal, convert, open_checked
from megads.convert.source import ReadOptions, Source, Trained, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from tests.cases import case
from tests.convert.hf_models import InMemory
from tests.convert.megatron_cases import (
    FILE,
    assert_same,
    canonical,
    core_name,
    joined,
    only_tensors,
    random_tensors,
    read_ranks,
)

LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    vocab_size=101,
    vocab_multiple=8,
    max_seq_length=32,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    qkv_bias=False,
    attn_out_bias=False,
    mlp_bias=False,
    tie_embeddings=False,
)
GPT = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=101,
    vocab_multiple=8,
    max_seq_length=32,
)
QWEN3 = LLAMA.model_copy(
    update={"qk_norm": True, "head_dim": 8, "tie_embeddings": True, "qkv_bias": True}
)


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def written(source: Source, target: Path, tp: int, pp: int, **options: Any) -> Path:
    seen: list[str] = []
    writing = WriteOptions(tp=tp, pp=pp, **options)
    convert(source, target, "megatron-lm", writing, lambda kind, name: seen.append(name))
    assert sorted(seen) == sorted(spec.name for spec in param_specs(source.model))
    return target


def replace(path: Path, content: dict[str, Any]) -> None:
    """Write anew what may still be mapped."""
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def memory(model: ModelConfig, tensors: dict[str, Tensor] | None = None) -> InMemory:
    return InMemory(model, random_tensors(model) if tensors is None else tensors)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("gpt_tp1pp1", 1, 1),
        ("gpt_tp2pp1", 2, 1),
        ("gpt_tp2pp2", 2, 2),
        ("llama_tp1pp1", 1, 1),
        ("llama_tp2pp2", 2, 2),
        ("qwen2_tp1pp1_bf16", 1, 1),
    ],
)
def test_writes_what_megatron_wrote(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Every name, shape and bit of every rank's file is as in the file of Megatron-LM itself."""
    folder = case(f"megatron_lm/{name}")
    source = open_checked(folder, "auto", ReadOptions(keep_padding=True))
    dtype = torch.bfloat16 if "bf16" in name else None
    target = written(source, tmp_path / "out", tp, pp, dtype=dtype)
    assert (target / "latest_checkpointed_iteration.txt").read_bytes() == b"4"
    mine, theirs = (read_ranks(path / "iter_0000004") for path in (target, folder))
    assert [len(stage) for stage in mine] == [tp] * pp
    for stage, their_stage in zip(mine, theirs, strict=True):
        for rank, their_rank in zip(stage, their_stage, strict=True):
            assert rank["model"].keys() == their_rank["model"].keys()
            assert_same(only_tensors(rank["model"]), only_tensors(their_rank["model"]))
            assert rank["checkpoint_version"] == 3.0 and rank["iteration"] == 4
            args, their_args = vars(rank["args"]), vars(their_rank["args"])
            ours = {"vocab_size", "seq_length", "iteration", "args", "ckpt_format"}
            unlike = {k for k in args.keys() - ours if args[k] != their_args.get(k)}
            assert unlike == set(), {k: (args[k], their_args.get(k)) for k in unlike}


def test_torch_itself_reads_what_is_written(tmp_path: Path) -> None:
    """By PyTorch's own loader: a plain Namespace of plain values beside the weights."""
    target = written(memory(GPT), tmp_path / "out", 2, 1)
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"
    path = target / "release" / "mp_rank_01" / FILE
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
        mapped = torch.load(path, weights_only=True, mmap=True)
    for name, tensor in only_tensors(content["model"]).items():
        assert torch.equal(mapped["model"][name], tensor)
        assert mapped["model"][name].data_ptr() % 64 == 0
    assert isinstance(content["args"], argparse.Namespace)
    assert content["args"].padded_vocab_size == 112 and content["args"].vocab_size == 101
    assert content["model"]["embedding.word_embeddings.weight"].shape == (56, 16)


@pytest.mark.parametrize("model", [LLAMA, GPT, QWEN3], ids=["llama", "gpt", "qwen3"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4), (1, 3)])
def test_every_layout_holds_the_model(model: ModelConfig, tp: int, pp: int, tmp_path: Path) -> None:
    source = memory(model)
    source.trained = Trained(7, 56, 16)
    target = written(source, tmp_path / "out", tp, pp)
    found = joined(target / "iter_0000007", model)
    if model.tie_embeddings:
        copy = found.pop("output_layer.weight", None)
        assert (copy is not None) == (pp > 1)
        assert copy is None or torch.equal(copy, found["embedding.word_embeddings.weight"])
    assert found.keys() == {core_name(name) for name in source.tensors}
    for name, tensor in source.tensors.items():
        whole = found[core_name(name)]
        if name in ("embedding.word.weight", "head.weight"):
            assert len(whole) == -(-101 // (8 * tp)) * 8 * tp and not whole[101:].any()
            whole = whole[:101]
        assert torch.equal(whole, tensor), name
    result = open_checked(target, "auto", ReadOptions())
    assert result.model == model and result.trained == source.trained
    assert check_equal(source, result, WriteOptions()) == len(source.tensors)


def test_chain_of_layouts_and_a_swap_that_is_seen(tmp_path: Path) -> None:
    source: Source = memory(LLAMA)
    for number, (tp, pp) in enumerate([(2, 1), (4, 2), (1, 4), (1, 1)]):
        source = open_checked(
            written(source, tmp_path / str(number), tp, pp), "megatron-lm", ReadOptions()
        )
    assert_same(canonical(source), random_tensors(LLAMA))
    tensors = random_tensors(LLAMA)
    tensors["blocks.1.mlp.up.weight"] = tensors["blocks.1.mlp.up.weight"].roll(1, 0)
    with pytest.raises(AssertionError, match=r"blocks.1.mlp.up"):
        assert_same(canonical(source), tensors)


def test_grouped_rows_are_per_kv_head(tmp_path: Path) -> None:
    """q0 q1 k0 v0 q2 q3 k1 v1, eight rows each, whatever the number of ranks."""
    model = LLAMA.model_copy(update={"num_layers": 1, "head_dim": 8, "hidden_size": 32})
    tensors = random_tensors(model)
    codes = [100, 101, 102, 103, 200, 201, 300, 301]
    rows = torch.tensor(codes, dtype=torch.float32).repeat_interleave(8)
    tensors["blocks.0.attn.qkv.weight"] = rows[:, None].expand(64, 32).contiguous()
    want = [100, 101, 200, 300, 102, 103, 201, 301]
    for tp in (1, 2, 4):
        target = written(memory(model, tensors), tmp_path / str(tp), tp, 1)
        (stage,) = read_ranks(target / "release")
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        found = [int(row[0]) for rank in stage for row in rank["model"][name]]
        assert found == [code for code in want for _ in range(8)]


@pytest.mark.parametrize(("heads", "kv"), [(4, 1), (4, 2), (6, 2), (6, 3), (8, 2)])
def test_grouped_ratios(heads: int, kv: int, tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "num_attention_heads": heads, "num_kv_heads": kv, "head_dim": 8}
    model = LLAMA.model_copy(update=sizes)
    for tp in (1, 2):
        if kv % tp and tp % kv:
            continue
        source = memory(model)
        target = written(source, tmp_path / str(tp), tp, 1)
        found = joined(target / "release", model)[
            "decoder.layers.0.self_attention.linear_qkv.weight"
        ]
        assert torch.equal(found, source.tensors["blocks.0.attn.qkv.weight"])
        result = open_checked(target, "auto", ReadOptions())
        assert_same(canonical(result), source.tensors)


def test_layers_keep_their_numbers(tmp_path: Path) -> None:
    model = GPT.model_copy(update={"num_layers": 5})
    tensors = random_tensors(model)
    for layer in range(5):
        tensors[f"blocks.{layer}.attn_norm.bias"] = torch.full((16,), float(layer))
    source: Source = memory(model, tensors)
    for pp, sizes in ((2, [2, 3]), (4, [2, 1, 1, 1]), (1, [5])):
        target = written(source, tmp_path / str(pp), 1, pp)
        stages = read_ranks(target / "release")
        name = "input_layernorm.bias"
        held = [
            [int(t[0]) for n, t in only_tensors(stage[0]["model"]).items() if name in n]
            for stage in stages
        ]
        assert [len(stage) for stage in held] == sizes
        assert list(itertools.chain(*held)) == list(range(5))
        source = open_checked(target, "auto", ReadOptions())
        assert_same(canonical(source), tensors)


def test_gates_and_ups_stay_apart(tmp_path: Path) -> None:
    model = LLAMA.model_copy(
        update={"mlp_bias": True, "attn_out_bias": True, "qkv_bias": True, "num_layers": 1}
    )
    tensors = random_tensors(model)
    stamps = torch.cat([torch.arange(1000.0, 1048.0), torch.arange(2000.0, 2048.0)])
    tensors["blocks.0.mlp.up.bias"] = stamps
    tensors["blocks.0.mlp.up.weight"] = stamps[:, None].expand(96, 16).contiguous()
    source: Source = memory(model, tensors)
    for tp in (1, 2, 4, 1):
        target = written(source, tmp_path / f"{tp}{source.format}", tp, 1)
        (stage,) = read_ranks(target / "release")
        for index, rank in enumerate(stage):
            bias = rank["model"]["decoder.layers.0.mlp.linear_fc1.bias"]
            first, count = 1000 + index * 48 // tp, 48 // tp
            gates = list(range(first, first + count))
            assert bias.tolist() == gates + [1000 + gate for gate in gates]
        source = open_checked(target, "auto", ReadOptions())
        assert_same(canonical(source), tensors)


@pytest.mark.parametrize(
    ("change", "tp", "pp", "match"),
    [
        ({"ffn_hidden_size": 3}, 2, 1, "ffn_hidden_size=3 cannot be split over tp=2"),
        ({"num_attention_heads": 6, "num_kv_heads": 6}, 4, 1, "num_attention_heads=6 cannot"),
        ({"num_attention_heads": 6, "num_kv_heads": 3}, 2, 1, "num_kv_heads=3 cannot"),
        ({}, 1, 5, "num_layers=4 cannot be split over pp=5"),
        ({"parallel_residual": True}, 1, 1, "nothing for a model with parallel_residual"),
        ({"position": "alibi"}, 1, 1, "position=alibi"),
        ({"activation": "relu"}, 1, 1, "activation=relu"),
        ({"activation": "gelu_tanh"}, 1, 1, "activation=gelu_tanh without biases"),
        ({"qk_norm": True, "norm": "layernorm"}, 1, 1, "qk_norm with norm=layernorm"),
        ({"attn_out_bias": True}, 1, 1, "attn_out_bias=True with mlp_bias=False"),
    ],
)
def test_what_cannot_be_written_is_refused(
    change: dict[str, Any], tp: int, pp: int, match: str, tmp_path: Path
) -> None:
    model = LLAMA.model_copy(update=change)
    with pytest.raises(CheckpointError, match=match):
        written(
            memory(model, {"embedding.word.weight": torch.zeros(101, 16)}), tmp_path / "x", tp, pp
        )
    assert not (tmp_path / "x").exists()


def test_padding_depends_on_the_layout_and_never_leaves_it(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["head.weight"] = -tensors["head.weight"].abs() - 1
    source: Source = memory(LLAMA, tensors)
    for tp, padded in ((4, 128), (2, 112), (1, 104)):
        target = written(source, tmp_path / str(tp), tp, 1)
        args = vars(read_ranks(target / "release")[0][0]["args"])
        assert (args["padded_vocab_size"], args["vocab_size"]) == (padded, 101)
        kept = open_source(target, "auto", ReadOptions(keep_padding=True))
        assert kept.model.vocab_size == padded
        assert not kept.tensor("param", "head.weight")[101:].any()
        source = open_checked(target, "auto", ReadOptions())
        assert source.tensor("param", "head.weight").shape == (101, 16)
        assert_same(canonical(source), tensors)


def test_virtual_stages(tmp_path: Path) -> None:
    """Four stages of one layer each, laid out as two stages of two chunks: chunk outer."""
    source = memory(GPT)
    folder = written(source, tmp_path / "out", 2, 4) / "release"
    four = read_ranks(folder)
    for stage, ranks in enumerate(four):
        for rank, content in enumerate(ranks):
            path = folder / f"mp_rank_{rank:02d}_{stage:03d}" / FILE
            if stage > 1:
                path.unlink()
                path.parent.rmdir()
                continue
            later = four[stage + 2][rank]["model"]
            args = argparse.Namespace(**vars(content["args"]) | {"pipeline_model_parallel_size": 2})
            del args.args
            state = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
            replace(path, state | {"model0": content["model"], "model1": later})
    result = open_checked(folder, "auto", ReadOptions())
    assert_same(canonical(result), source.tensors)
    assert result.trained.step == 3


@pytest.mark.parametrize("which", ["tied", "replicated"])
def test_copies_that_differ_are_refused(which: str, tmp_path: Path) -> None:
    tied = which == "tied"
    folder = written(memory(GPT), tmp_path / "out", 2, 2) / "release"
    stage = 1 if tied else 0
    path = folder / f"mp_rank_01_00{stage}" / FILE
    content = read_ranks(folder)[stage][1]
    args = argparse.Namespace(**vars(content["args"]))
    del args.args
    name = "output_layer.weight" if tied else "embedding.position_embeddings.weight"
    state = {
        key: None if value is None else value.clone() for key, value in content["model"].items()
    }
    state[name][3] += 1
    replace(path, {"args": args, "iteration": 0, "checkpoint_version": 3.0, "model": state})
    with pytest.raises(CheckpointError, match="should be"):
        canonical(open_checked(folder, "auto", ReadOptions()))
