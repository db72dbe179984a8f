"""Checkpoints by Megatron-LM itself: hashes, logits, master weights, moments."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megads
from megads.convert.formats import open_source
from megads.convert.megatron import args as megatron_args
from megads.convert.megatron import join as megatron_join
from megads.convert.megatron import reader as megatron
from megads.convert.pickles import load_pickle
from megads.convert.run import convert, open_checked
from megads.convert.source import ReadOptions, Source, Trained, WriteOptions
from megads.errors import CheckpointError
from tests.cases import ROOT, case
from tests.convert.megatron_cases import (
    FILE,
    GPT,
    LLAMA,
    canonical,
    core_name,
    differing,
    hashes,
    training_samples,
)

CORE = [f"megatron_lm/{name}" for name in (*GPT, *LLAMA, "qwen2_tp1pp1_bf16", "qwen3_dist")]
OLD = ["megatron_lm_old/gpt_tp2pp1", "megatron_lm_old/gpt_tp1pp1_bf16"]
WORDS = ReadOptions(vocab_size=512)


def to_megads(source: Source, target: Path, dtype: torch.dtype | None = None) -> Path:
    convert(source, target, "megads", WriteOptions(dtype=dtype), lambda kind, name: None)
    return target


@pytest.mark.parametrize("name", CORE + OLD)
def test_gives_its_hashes_and_logits(name: str, tmp_path: Path) -> None:
    folder = case(name)
    halves = "bf16" in name
    source = open_checked(folder, "auto", WORDS)
    assert source.format == "megatron-lm"
    assert source.trained == Trained(4, 32, 48) and source.model.vocab_size == 512
    assert {path.name for path in source.extras} == {
        path.name for path in (source.path / "tokenizer").glob("*.json")
    }
    target = to_megads(source, tmp_path / "out", torch.bfloat16 if halves else None)
    result = open_checked(target, "megads", ReadOptions())
    assert result.kinds == source.kinds
    assert (result.trained.step, result.trained.samples) == (4, 32)
    assert differing(result.model, canonical(result), hashes(folder)) == set()
    logits = "expected_logits_fp32.npy" if halves else "expected_logits.npy"
    want = torch.from_numpy(np.load(folder / logits))
    ids = torch.from_numpy(np.load(folder / "expected_input_ids.npy"))
    with torch.no_grad():
        got = megads.load_model(target, dtype=torch.float32)(ids)
    assert got.shape == want.shape and (got - want).abs().max() < 1e-4


def in_rank_order(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return torch.cat(list(parts))


@pytest.mark.parametrize(
    ("name", "module", "attribute", "change", "broken"),
    [
        ("gpt_tp2pp2", megatron, "qkv_order", lambda version: "thirds", "c_attn"),
        ("llama_tp2pp2", megatron_join, "from_grouped", lambda whole, model: whole, "k_proj"),
        ("llama_tp2pp2", megatron_join, "in_sections", in_rank_order, "gate_proj"),
    ],
)
def test_hashes_tell_what_is_wrong(
    name: str,
    module: object,
    attribute: str,
    change: Callable[..., object],
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = case(f"megatron_lm/{name}")
    monkeypatch.setattr(module, attribute, change)
    source = open_checked(folder, "auto", WORDS)
    names = differing(source.model, canonical(source), hashes(folder))
    assert any(broken in other for other in names) and not any("norm" in other for other in names)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["start_gpt", "start_llama", "llama_dist_tp2pp1", "qwen3_dist"])
def test_torch_dist_is_what_torch_reads(name: str) -> None:
    """PyTorch's own reader, of trusted files, gives the same weights and moments."""
    folder = case(f"megatron_lm/{name}")
    source = open_checked(folder, "auto", ReadOptions())
    assert source.model.vocab_size == 512 and source.notes == ()  # by its tokenizer
    assert {path.name for path in source.extras} == {"tokenizer.json", "tokenizer_config.json"}
    reader = FileSystemReader(source.path)
    flat = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(flat, storage_reader=reader, no_dist=True)
    for kind in source.kinds:
        prefix = "" if kind == "param" else f"optimizer.state.{kind}."
        for ours, tensor in canonical(source, kind).items():
            assert torch.equal(tensor, _of_global(flat, prefix, ours, source)), (kind, ours)


def _of_global(flat: dict[str, Tensor], prefix: str, name: str, source: Source) -> Tensor:
    """A canonical tensor from the global ones, row by row."""
    model, core = source.model, core_name(name)
    if core.startswith("decoder.layers."):
        _, _, layer, rest = core.split(".", 3)
        rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        whole = flat[f"{prefix}decoder.layers.{rest}"][int(layer)]
        if "linear_qkv.weight" in rest or "linear_qkv.bias" in rest:
            group = model.num_attention_heads // model.num_kv_heads + 2
            heads = whole.split(model.head_dim)
            keys, values = heads[group - 2 :: group], heads[group - 1 :: group]
            queries = [h for i, h in enumerate(heads) if i % group < group - 2]
            return torch.cat([*queries, *keys, *values])
        return whole
    return (
        flat[prefix + core][:512]
        if "position" not in core and "norm" not in core
        else flat[prefix + core]
    )


@dataclass(frozen=True)
class Run:
    """Four updates of AdamW, as Megatron-LM made them: what its files should hold."""

    start: str
    rates: tuple[float, ...] = (0.0, 0.005, 0.01, 0.009336825748732971)

    def train(self, tmp_path: Path) -> dict[str, dict[str, Tensor]]:
        """Weights and moments by canonical name, the padded rows included."""
        folder = case(f"megatron_lm/{self.start}")
        source = open_checked(folder, "auto", ReadOptions(keep_padding=True))
        assert source.model.vocab_size == 528
        model = megads.load_model(to_megads(source, tmp_path / "start")).train()
        named = {n.removeprefix("stage."): p for n, p in model.named_parameters()}
        matrices = [p for p in named.values() if p.ndim > 1]
        vectors = [p for p in named.values() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        samples = training_samples(ROOT)
        for step, rate in enumerate(self.rates):
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = samples[8 * step : 8 * step + 8]
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return {
            "param": {n: p.detach() for n, p in named.items()},
            "exp_avg": {n: optimizer.state[p]["exp_avg"] for n, p in named.items()},
            "exp_avg_sq": {n: optimizer.state[p]["exp_avg_sq"] for n, p in named.items()},
        }


@pytest.mark.parametrize(
    ("start", "trained"),
    [("start_gpt", ("gpt_tp1pp1", "gpt_tp2pp1")), ("start_llama", ("llama_dist_tp2pp1",))],
)
def test_moments_are_those_of_the_run(start: str, trained: tuple[str, ...], tmp_path: Path) -> None:
    """The stored moments belong to the parameters that training gives them to."""
    run = Run(start).train(tmp_path)
    for name in trained:
        source = open_checked(case(f"megatron_lm/{name}"), "auto", ReadOptions(keep_padding=True))
        assert source.kinds == ("param", "exp_avg", "exp_avg_sq")
        assert source.training_state()["optimizer_updates"] == 4
        for kind in source.kinds:
            for ours, tensor in canonical(source, kind).items():
                want = run[kind][ours]
                assert tensor.dtype == torch.float32
                error = (tensor - want).norm() / want.norm()
                # Keys need no bias: its gradient is nothing but rounding, which Adam scales up.
                limit = 2e-2 if (kind, ours[-8:]) == ("param", "qkv.bias") else 1e-3
                assert error < limit, (name, kind, ours, float(error))
                other = run[kind]["blocks.1.mlp.down.weight"]
                if ours == "blocks.2.mlp.down.weight":  # the measure tells two layers apart
                    assert (tensor - other).norm() / other.norm() > 0.5


@pytest.mark.parametrize(
    "name", ["megatron_lm/qwen2_tp1pp1_bf16", "megatron_lm_old/gpt_tp1pp1_bf16"]
)
def test_masters_are_the_weights_before_rounding(name: str) -> None:
    source = open_checked(case(name), "auto", WORDS)
    content = load_pickle(source.path / "mp_rank_00" / FILE)
    masters = [m for group in content["optimizer"]["fp32_from_fp16_params"] for m in group]
    words = source.tensor("param", "embedding.word.weight")
    assert "fp32 masters" in source.notes[0]
    assert words.dtype == torch.float32 and torch.equal(words, masters[0][:512])
    rounded = {n: t.to(torch.bfloat16) for n, t in canonical(source).items()}
    assert differing(source.model, rounded, hashes(case(name))) == set()
    assert differing(source.model, canonical(source), hashes(case(name))) != set()
    state = content["optimizer"]["optimizer"]["state"]
    assert torch.equal(source.tensor("exp_avg", "embedding.word.weight"), state[0]["exp_avg"][:512])


def test_masters_of_other_weights_are_refused(tmp_path: Path) -> None:
    folder = case("megatron_lm/qwen2_tp1pp1_bf16")
    source = open_checked(folder, "auto", WORDS)
    source._parts["param"]["decoder.final_layernorm.weight"][0].tensor.add_(1)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"fp32_from_fp16_params.1.12 should be the master"):
        source.tensor("param", "final_norm.weight")


def test_vocabulary() -> None:
    folder = case("megatron_lm/gpt_tp2pp1")
    source = open_source(folder)
    assert source.model.vocab_size == 528 and "--vocab-size" in source.notes[0]
    assert open_source(folder, "auto", ReadOptions(keep_padding=True)).notes == ()
    with pytest.raises(CheckpointError, match="529 words cannot be in 528 rows"):
        open_source(folder, "auto", ReadOptions(vocab_size=529))
    dist = open_source(case("megatron_lm/start_gpt"), "auto", ReadOptions(keep_padding=True))
    assert dist.model.vocab_size == 528


def test_iterations(tmp_path: Path) -> None:
    folder = case("megatron_lm/gpt_tp1pp1")
    assert open_source(folder, "auto", ReadOptions(step=2)).trained.step == 2
    assert open_source(folder / "iter_0000002", "auto").trained.step == 2
    with pytest.raises(CheckpointError, match="no iteration 3; there are 2, 4"):
        open_source(folder, "auto", ReadOptions(step=3))
    with pytest.raises(CheckpointError, match="iter_0000002 is not of --step 4"):
        open_source(folder / "iter_0000002", "auto", ReadOptions(step=4))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tracker = copy / "latest_checkpointed_iteration.txt"
    for text, match in (("", "says ''"), ("9", "names iteration 9"), ("../x", "says '../x'")):
        tracker.write_text(text)
        with pytest.raises(CheckpointError, match=match):
            open_source(copy)
    tracker.unlink()
    with pytest.raises(CheckpointError, match="choose one of 2, 4 with --step"):
        open_source(copy)
    (copy / "iter_0000004").rename(copy / "release")
    tracker.write_text("release")
    assert open_source(copy).path == copy / "release"


def test_damage_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(case("megatron_lm/gpt_tp2pp2"), copy)
    file = copy / "iter_0000004" / "mp_rank_01_001" / FILE
    whole = file.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng\.pt"):
            open_source(copy)
    file.unlink()
    with pytest.raises(CheckpointError, match="none of tensor rank 1 in stage 1"):
        open_source(copy)
    shutil.rmtree(file.parent)
    shutil.rmtree(copy / "iter_0000004" / "mp_rank_00_001")
    with pytest.raises(CheckpointError, match=r"num_layers=4, and the files hold 2|parallel_size"):
        open_source(copy)
    dist = tmp_path / "dist"
    shutil.copytree(case("megatron_lm/llama_dist_tp2pp1"), dist)
    chunks = dist / "iter_0000004" / "__1_0.distcp"
    whole = chunks.read_bytes()
    chunks.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(CheckpointError, match=r"\.metadata: __1_0.distcp ends at byte"):
        open_source(dist)
    chunks.write_bytes(whole)
    source = open_source(dist)
    chunks.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp"):
        canonical(source)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp"):
        open_source(dist)


@pytest.mark.parametrize(
    ("one", "other"), [("gpt_tp1pp1", "gpt_tp2pp1"), ("llama_tp1pp1", "llama_tp2pp2")]
)
def test_layouts_agree(one: str, other: str) -> None:
    """The same run in two layouts: the same weights but for rounding, layer by layer."""
    first, second = (
        canonical(open_source(case(f"megatron_lm/{name}"), "auto", WORDS)) for name in (one, other)
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        # The gradient of the keys' bias is nothing but rounding, which Adam scales up.
        limit = 2e-2 if name.endswith("qkv.bias") else 1e-3
        assert (tensor - second[name]).norm() / tensor.norm() < limit, name
    one_layer, another = (second[f"blocks.{i}.mlp.down.weight"] for i in (1, 2))
    assert (one_layer - another).norm() / another.norm() > 0.5


def test_a_directory_without_rights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(case("megatron_lm/llama_dist_tp2pp1"), copy)
    (copy / "iter_0000004" / "tokenizer").mkdir(exist_ok=True)
    (copy / "iter_0000004" / "tokenizer" / "tokenizer.json").write_text("{}")
    read = Path.read_text

    def refuse(path: Path, **options: Any) -> str:
        if path.name == "tokenizer.json":
            raise PermissionError("not for you")
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: PermissionError: not for you"):
        open_source(copy)


def test_arguments_of_torch_dist_that_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = case("megatron_lm/llama_dist_tp2pp1")
    monkeypatch.setattr(megatron_args, "_REFUSED", ("num_layers",))
    with pytest.raises(CheckpointError, match=r"iter_0000004: not supported: .*num_layers=4"):
        open_source(folder)


def test_a_window_that_is_no_number_is_named() -> None:
    for size, window in (((255, 0), 256), ((-1, 0), None), (None, None)):
        assert megatron_args._window({"window_size": size}) == window
    for size in ("x", [], 3):
        with pytest.raises(CheckpointError, match="the stored arguments say window_size="):
            megatron_args._window({"window_size": size})
