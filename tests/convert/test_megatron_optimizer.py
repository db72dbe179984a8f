"""The optimizer's state by Megatron-LM's rules, laid out here by loops with stamps in it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.run import convert, open_checked
from megads.convert.source import ReadOptions, Source, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from tests.convert.hf_models import InMemory
from tests.convert.megatron_cases import FILE, assert_same, canonical, random_tensors, read_ranks

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=20,
    vocab_size=21,
    vocab_multiple=3,
    max_seq_length=7,
)
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@dataclass
class Written:
    """A checkpoint in bf16 without an optimizer's state, and what there should be in one."""

    folder: Path
    masters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    ranks: list[list[dict[str, Any]]]
    parts: dict[str, list[list[dict[str, Tensor]]]]

    def path(self, stage: int, rank: int, name: str) -> Path:
        pp = len(self.ranks)
        folder = f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
        return self.folder / folder / name

    def save(self, stage: int, rank: int, optimizer: Any, **args: Any) -> None:
        content = self.ranks[stage][rank]
        values = {k: v for k, v in vars(content["args"]).items() if k != "args"} | args
        new = {"args": argparse.Namespace(**values), "optimizer": optimizer}
        path = self.path(stage, rank, FILE)
        torch.save({**content, **new}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def check(self, source: Source) -> None:
        assert source.kinds == ("param", *MOMENTS)
        assert_same(canonical(source), self.masters)
        for kind in MOMENTS:
            assert_same(canonical(source, kind), self.moments[kind])  # type: ignore[arg-type]
        assert source.training_state()["optimizer_updates"] == 11


Tensors = Callable[[ModelConfig, int], dict[str, Tensor]]


def prepare(
    model: ModelConfig, tmp_path: Path, tp: int, pp: int, tensors_of: Tensors = random_tensors
) -> Written:
    """Write masters and moments as if they were weights, to have every rank's parts of them."""
    masters = tensors_of(model, 1)
    moments = {kind: tensors_of(model, 2 + i) for i, kind in enumerate(MOMENTS)}
    parts = {}
    for name, tensors in {"param": masters, **moments}.items():
        target = tmp_path / name
        writing = WriteOptions(tp=tp, pp=pp)
        convert(InMemory(model, tensors), target, "megatron-lm", writing, lambda kind, name: None)
        parts[name] = [
            [{k: v for k, v in rank["model"].items() if v is not None} for rank in stage]
            for stage in read_ranks(target / "release")
        ]
    target = tmp_path / "checkpoint"
    writing = WriteOptions(tp=tp, pp=pp, dtype=torch.bfloat16)
    convert(InMemory(model, masters), target, "megatron-lm", writing, lambda kind, name: None)
    folder = target / "release"
    return Written(folder, masters, moments, read_ranks(folder), parts)


def module_order(state: dict[str, Tensor]) -> list[str]:
    """The order of the file, which is that of the model."""
    return list(state)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_masters_and_moments_by_number(tp: int, pp: int, tmp_path: Path) -> None:
    """Numbers go through the decayed parameters, then the others; either kind by stage."""
    made = prepare(MODEL, tmp_path, tp, pp)
    for stage in range(pp):
        for rank in range(tp):
            names = module_order(made.parts["param"][stage][rank])
            shapes = made.parts["param"][stage][rank]
            decayed = [n for n in names if shapes[n].ndim == 2]
            others = [n for n in names if shapes[n].ndim == 1]
            numbers = {n: i for i, n in enumerate(decayed + others)}
            state = {
                numbers[n]: {"step": 11.0} | {m: made.parts[m][stage][rank][n] for m in MOMENTS}
                for n in names
            }
            groups = [
                {"wd_mult": 1.0, "params": [numbers[n] for n in decayed]},
                {"wd_mult": 0.0, "params": [numbers[n] for n in others]},
            ]
            masters = [[shapes[n] for n in group] for group in (decayed, others)]
            inner = {"state": state, "param_groups": groups}
            made.save(stage, rank, {"optimizer": inner, "fp32_from_fp16_params": masters})
    source = open_checked(made.folder, "auto", ReadOptions())
    made.check(source)
    embedding = source.tensor("exp_avg", "embedding.word.weight")
    rows = torch.cat(
        [part["embedding.word_embeddings.weight"] for part in made.parts["exp_avg"][0]]
    )
    assert torch.equal(embedding, rows[:21])
    for _ in range(2):
        made.check(open_checked(made.folder, "auto", ReadOptions()))


def flat_buffer(
    states: dict[str, dict[str, Tensor]],
    bucket_size: float,
    alone: str | None,
    dp: int,
    *,
    counts_padding: bool = False,
) -> dict[str, list[Tensor]]:
    """Each bucket's elements of each state: parameters from the last one on, at multiples of 64.

    Buckets are padded for `dp` ranks to share them; a full bucket, or `alone`, ends one.
    `counts_padding`: of versions that pad the bucket before `alone` first and count it then.
    """
    names = list(states["param"])[::-1]
    buckets: dict[str, list[Tensor]] = {key: [] for key in states}
    open_one: list[str] = []

    def close() -> None:
        for key, state in states.items():
            elements: list[float] = []
            for name in open_one:
                elements += [math.nan] * (-len(elements) % 64)
                elements += state[name].flatten().tolist()
            real = len(elements)
            if alone is not None and following == alone:
                real += -real % 64  # what comes next was already placed when the bucket ended
                if counts_padding and real % dp:
                    real += -real % math.lcm(dp, 128)
            elements += [math.nan] * (-len(elements) % math.lcm(dp, 128))
            buckets[key].append(torch.tensor(elements))
            sizes.setdefault(len(buckets[key]) - 1, real)
        open_one.clear()

    sizes: dict[int, int] = {}
    following: str | None = None
    for name in names:
        following = name
        if name == alone and open_one:
            close()
        open_one.append(name)
        following = None
        length = 0
        for one in open_one:
            length += -length % 64 + states["param"][one].numel()
        if length >= bucket_size or name == alone:
            close()
    if open_one:
        close()
    buckets["sizes"] = [torch.tensor(sizes[i]) for i in range(len(sizes))]
    return buckets


@pytest.mark.parametrize("coalesced", ["together", "together, padded", "apart"])
@pytest.mark.parametrize(
    ("tp", "pp", "bucket_size"), [(1, 1, None), (2, 1, 300), (1, 2, None), (2, 2, 500), (1, 1, 1)]
)
def test_distributed_optimizer(
    tp: int, pp: int, bucket_size: int | None, coalesced: str, tmp_path: Path
) -> None:
    made = prepare(MODEL, tmp_path, tp, pp)
    for stage in range(pp):
        for rank in range(tp):
            write_buffers(made, stage, rank, bucket_size, coalesced)
    source = open_checked(made.folder, "auto", ReadOptions())
    made.check(source)
    assert "distrib_optim.pt:0.exp_avg[decoder" in source.origins("exp_avg", "final_norm.bias")[0]


def write_buffers(
    made: Written, stage: int, rank: int, bucket_size: int | None, coalesced: str, **args: Any
) -> None:
    """A rank's `distrib_optim.pt`, and its arguments."""
    pp, dp = len(made.ranks), 3
    states = {key: made.parts[key][stage][rank] for key in ("param", *MOMENTS)}
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    alone = next((n for n in ends if n in states["param"]), None) if pp > 1 else None
    limit = bucket_size if bucket_size is not None and stage == 0 else math.inf
    padded = coalesced == "together, padded"
    buckets = flat_buffer(states, limit, alone, dp, counts_padding=padded)
    sizes = [int(size) for size in buckets.pop("sizes")]
    if coalesced != "apart":
        flat: Any = {
            key: torch.cat([p[:size] for p, size in zip(pieces, sizes, strict=True)])
            for key, pieces in buckets.items()
        }
        flat["numel_unpadded"] = sum(sizes)
    else:
        flat = [{key: pieces[i] for key, pieces in buckets.items()} for i in range(len(sizes))]
    content = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): flat}}
    torch.save(content, made.path(stage, rank, "distrib_optim.pt"))
    groups = [{"wd_mult": 1.0, "step": 11, "params": []}]
    made.save(
        stage,
        rank,
        {"optimizer": {"param_groups": groups}},
        use_distributed_optimizer=True,
        overlap_grad_reduce=bucket_size is not None,
        ddp_bucket_size=bucket_size,
        data_parallel_size=dp,
        **args,
    )


def test_another_layout_of_buffers_is_refused(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 1, 1)
    write_buffers(made, 0, 0, None, "together")
    path = made.path(0, 0, "distrib_optim.pt")
    content = torch.load(path)
    (flat,) = content[0].values()
    moved = {key: flat[key].roll(1) for key in ("param", *MOMENTS)}
    torch.save({**content, 0: {"buffer": moved}}, path)
    source = open_checked(made.folder, "auto", ReadOptions())
    with pytest.raises(CheckpointError, match="should be the master weights"):
        canonical(source)
    torch.save({**content, 0: {"buffer": {key: flat[key][:-1] for key in moved}}}, path)
    with pytest.raises(CheckpointError, match=r"distrib_optim.pt: param has .* another layout"):
        open_checked(made.folder, "auto", ReadOptions())


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 1, 1)
    groups = [{"wd_mult": 1.0, "params": [0, 1]}, {"wd_mult": 0.0, "params": [2]}]
    made.save(0, 0, {"optimizer": {"state": {0: {}}, "param_groups": groups}})
    with pytest.raises(CheckpointError, match="the optimizer's groups lack"):
        open_checked(made.folder, "auto", ReadOptions())
    groups[0]["params"] = list(range(999))
    made.save(0, 0, {"optimizer": {"state": {0: {}}, "param_groups": groups}})
    with pytest.raises(CheckpointError, match="has 999 parameters, and the model has 18"):
        open_checked(made.folder, "auto", ReadOptions())


def stamps(model: ModelConfig, kind: int) -> dict[str, Tensor]:
    """Element j of parameter p is 100000 x kind + 1000 x p + j, which fp32 holds exactly."""
    return {
        spec.name: (100_000.0 * kind + 1000 * p + torch.arange(spec.numel)).view(spec.shape)
        for p, spec in enumerate(param_specs(model))
    }


def test_stamps_stay_with_their_elements(tmp_path: Path) -> None:
    made = prepare(MODEL, tmp_path, 2, 1, stamps)
    write_buffers(made, 0, 0, 300, "together")
    write_buffers(made, 0, 1, 300, "together")
    source = open_checked(made.folder, "auto", ReadOptions())
    assert source.kinds == ("param", *MOMENTS)
    for number, kind in enumerate(source.kinds, 1):
        for p, spec in enumerate(param_specs(MODEL)):
            elements = source.tensor(kind, spec.name).flatten().tolist()
            first = 100_000 * number + 1000 * p
            assert elements == list(range(first, first + spec.numel)), (kind, spec.name)
    for rank in range(2):
        path = made.path(0, rank, "distrib_optim.pt")
        content = torch.load(path)
        (flat,) = content[0].values()
        flat["exp_avg"][:2] = flat["exp_avg"][:2].flip(0)  # nothing but the stamps can tell
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    source = open_checked(made.folder, "auto", ReadOptions())
    with pytest.raises(AssertionError, match=r"final_norm\.bias"):
        assert_same(canonical(source, "exp_avg"), made.moments["exp_avg"])
