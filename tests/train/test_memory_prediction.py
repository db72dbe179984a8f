"""Predicted bytes of model states equal the measured ones, for random configurations.

A rank of any layout is made in this process: its axes have their sizes but no process groups, and
collectives do nothing. What is measured is what the tensors of that rank hold.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.compose import compose
from megads.config.decode import decode
from megads.config.schema import Config
from megads.config.validate import resolve_layout, validate
from megads.errors import LayoutError
from megads.kernels.api import select_kernels
from megads.models.families import param_count, param_specs
from megads.models.gpt import GPTStage
from megads.models.saved import SavedTensors
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis, Mesh
from megads.pipeline.partition import plan_stages
from megads.pipeline.schedule import build_schedule
from megads.train.build import DTYPES, build_modules, build_optimizer
from megads.train.memory import (
    ActivationMemory,
    predict_activations,
    predict_states,
    require_room,
    shard_size,
)
from megads.zero.memory import StateMemory
from tests.distributed import Workers
from tests.training import FAMILIES, run_training, tiny_config, world_size, write_tokens

CONFIGURATIONS = 200


class NoDist:
    """Stands in for torch.distributed: the other ranks' part never comes."""

    @staticmethod
    def get_backend(group: object) -> str:
        return "gloo"

    @staticmethod
    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> None:
        pass

    broadcast = all_reduce


def fill_with_zeros(out: Tensor, *args: Any, **options: Any) -> None:
    out.zero_()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "dist", NoDist)
    monkeypatch.setattr(collectives, "_all_gather_single", fill_with_zeros)
    monkeypatch.setattr(collectives, "_reduce_scatter_single", fill_with_zeros)


def mesh_of(layout: ParallelLayout, rank: int, kv_heads: int, shard: int) -> Mesh:
    """The mesh of `rank` without anybody else."""
    at = layout.coords(rank)

    def axis(name: str, size: int, index: int) -> Axis:
        return Axis(name, size, index, tuple(range(size)))

    copies = max(1, layout.tp // kv_heads)
    return dataclasses.replace(
        Mesh.single(),
        layout=layout,
        coords=at,
        tp=axis("tp", layout.tp, at.tp),
        pp=axis("pp", layout.pp, at.pp),
        dp=axis("dp", layout.dp, at.dp),
        shard=axis("shard", shard, at.dp % shard),
        replica=axis("replica", layout.dp // shard, at.dp // shard),
        kv=axis("kv", copies, at.tp % copies),
        tied=axis("tied", min(layout.pp, 2), int(at.pp > 0)),
        world=axis("world", layout.world_size, rank),
    )


def measured(
    config: Config, layout: ParallelLayout, rank: int
) -> tuple[StateMemory, ActivationMemory]:
    """Build one rank, run the passes of its schedule and an update."""
    dtype, model = DTYPES[config.precision.name], config.model
    mesh = mesh_of(layout, rank, model.num_kv_heads, shard_size(config, layout.dp))
    kernels, _ = select_kernels(config.kernels, mesh.device, dtype)
    plan = plan_stages(model, layout.pp, config.parallel.chunks, config.train.seq_length)
    saved = SavedTensors(counts=True, offloads=config.train.offload_activations)
    modules = build_modules(config, plan, mesh, kernels, dtype, saved)
    optimizer = build_optimizer(config, modules, mesh, kernels, dtype)
    optimizer.zero_grad()
    train, parallel = config.train, config.parallel
    microbatches = train.global_batch_size // (train.micro_batch_size * layout.dp)
    schedule = build_schedule(parallel.schedule, layout.pp, parallel.chunks, microbatches)
    actions = [action for action in schedule[mesh.pp.index] if action.op in ("F", "B")]
    outputs = {}
    for number, (op, chunk, microbatch) in enumerate(actions):
        if op == "F":
            outputs[chunk, microbatch] = forward(config, modules[chunk], mesh)
        else:
            out = outputs.pop((chunk, microbatch))
            is_last = all(a.op == "F" or a.chunk != chunk for a in actions[number + 1 :])
            optimizer.gradients.before_backward(chunk, is_last=is_last)
            out.backward(torch.ones_like(out))
            optimizer.gradients.after_backward(chunk)
    optimizer.finish_gradients()
    optimizer.step(0.1)
    used = optimizer.memory()
    optimizer.close()
    tables = sum(module.table_bytes for module in modules)
    return used, ActivationMemory(saved.device.peak, saved.host.peak, tables)


def forward(config: Config, module: GPTStage, mesh: Mesh) -> Tensor:
    train, dtype = config.train, DTYPES[config.precision.name]
    tokens = torch.zeros(train.micro_batch_size, train.seq_length, dtype=torch.int64)
    shards = mesh.tp.size if config.parallel.sequence_parallel else 1
    rows = train.micro_batch_size * train.seq_length // shards
    hidden = torch.randn(rows, config.model.hidden_size).to(dtype).requires_grad_()
    module.dropout_rng.seed(1, 2, 3)
    starts = mask = None
    if config.data.document_mask:  # documents of 3 tokens and of one, and what is left
        starts = torch.tensor([0, 0, 0, 3, *[4] * (train.seq_length - 4)]).expand_as(tokens)
        mask = torch.ones(tokens.shape)
    batch = MicroBatch(tokens, tokens.clone(), mask, 0, document_starts=starts)
    out: Tensor = module(hidden, batch)
    return out


def configurations(tmp_path: Path) -> Iterator[tuple[Config, ParallelLayout]]:
    """Random models and layouts that are valid."""
    draw, data = random.Random(3), write_tokens(tmp_path / "tokens")
    families = [tiny_config(tmp_path / "run", data, family).model_dump() for family in FAMILIES]
    found = 0
    while found < CONFIGURATIONS:
        tp, pp, dp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 4, 6))
        zero, chunks = draw.randrange(4), draw.choice((1, 1, 2)) if pp > 1 else 1
        shards = [d for d in range(1, dp + 1) if dp % d == 0]
        values = copy.deepcopy(draw.choice(families))
        values["parallel"] |= {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "chunks": chunks,
            "zero": zero,
            "zero_shard_size": draw.choice(shards) if zero and draw.random() < 0.4 else None,
            "offload": draw.choice(("none", "none", "cpu", "nvme")),
            "bucket_mb": draw.choice((0.001, 0.004, 0.02, 1.0)),
            "offload_budget_mb": draw.choice((0.01, 0.1, 2.0)),
            "sequence_parallel": tp > 1 and draw.random() < 0.5,
        }
        values["model"] |= {
            "num_layers": draw.randrange(pp * chunks, 7),
            "ffn_hidden_size": 4 * draw.randrange(1, 20),
            "vocab_size": draw.choice((97, 101, 263)),
        }
        heads, kv = draw.choice(((4, 2), (4, 4), (8, 2)))
        values["model"] |= {"num_attention_heads": heads, "num_kv_heads": kv}
        if values["model"]["activation"] != "swiglu":
            values["model"]["activation"] = draw.choice(("gelu", "relu", "geglu"))
        values["model"] |= {
            "attention_window": draw.choice((None, None, 5)),
            "hidden_dropout": draw.choice((0.0, 0.0, 0.1)),
            "attention_dropout": draw.choice((0.0, 0.0, 0.1)),
        }
        values["train"] |= {
            "micro_batch_size": draw.choice((1, 2)),
            "recompute": draw.choice(("none", "none", "selective", "full")),
            "offload_activations": draw.random() < 0.3,
        }
        if values["train"]["recompute"] == "full":
            values["train"]["recompute_layers"] = draw.choice((None, 1))
        if chunks == 1:
            values["parallel"]["schedule"] = draw.choice(("1f1b", "gpipe"))
        values["precision"]["name"] = draw.choice(("fp32", "bf16"))
        values["data"]["document_mask"] = draw.random() < 0.4
        values["train"]["global_batch_size"] = 4 * dp
        if draw.random() < 0.3:
            values["optim"] |= {"name": "sgd", "momentum": draw.choice((0.0, 0.9))}
        config = decode(values)
        if validate(config, tp * pp * dp):
            continue
        found += 1
        yield config, resolve_layout(config, tp * pp * dp)


@pytest.mark.usefixtures("alone")
def test_predicted_bytes_are_the_measured_ones(tmp_path: Path) -> None:
    """On any rank of each stage."""
    draw = random.Random(4)
    for config, layout in configurations(tmp_path):
        for stage in range(layout.pp):
            ranks = [r for r in range(layout.world_size) if layout.coords(r).pp == stage]
            want = (
                predict_states(config, layout, stage),
                predict_activations(config, layout, stage, device="cpu"),
            )
            rank = draw.choice(ranks)
            assert measured(config, layout, rank) == want, (rank, config)


RUNS = [
    ("tp2pp2", "1f1b", ("data.document_mask=true",)),
    ("pp2vpp2dp2zero3", "auto", ("train.recompute=selective",)),
    ("dp2zero2", "auto", ("parallel.offload=cpu", "train.offload_activations=true")),
    ("pp2", "gpipe", ("train.recompute=full", "train.recompute_layers=1")),
]


@pytest.mark.parametrize(("layout", "schedule", "others"), RUNS)
def test_a_run_reports_what_was_predicted(
    tmp_path: Path, workers: Workers, layout: str, schedule: str, others: tuple[str, ...]
) -> None:
    """The largest of each kind over the ranks, from metrics.jsonl."""
    options = ["train.steps=2", "train.micro_batch_size=2", "train.global_batch_size=16"]
    options += [f"parallel={layout}", f"parallel.schedule={schedule}", "logging.activations=true"]
    data = write_tokens(tmp_path / "tokens")
    config = tiny_config(tmp_path / "run", data, "llama", *options, *others)
    line = run_training(workers, config)[-1]
    sizes = resolve_layout(config, world_size(config))
    states = [predict_states(config, sizes, stage) for stage in range(sizes.pp)]
    kept = [predict_activations(config, sizes, s, device="cpu") for s in range(sizes.pp)]
    assert line["parameter_bytes"] == max(s.device.parameters for s in states)
    assert line["gradient_bytes"] == max(s.device.gradients for s in states)
    assert line["optimizer_bytes"] == max(s.device.optimizer for s in states)
    assert line["host_bytes"] == max(s.host.total for s in states)
    assert line["buffer_bytes"] == max(k.tables for k in kept)
    assert line["activation_bytes"] == max(k.device for k in kept)
    assert line["activation_host_bytes"] == max(k.host for k in kept)


def published(name: str, **groups: dict[str, Any]) -> Config:
    """A preset, with other settings."""
    values = compose([f"model={name}"]).model_dump()
    for group, fields in groups.items():
        values[group] = values[group] | fields
    return decode(values)


@pytest.mark.parametrize("shards", [2, 8, 64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_follow_the_formula_of_the_paper(shards: int, precision: str) -> None:
    """Rajbhandari et al. 2020, figure 1, with fp32 gradients: with P parameters of w bytes,
    (w + 4 + s) P, (w + 4) P + s P / N, w P + (4 + s) P / N and (w + 4 + s) P / N under stages 0 to
    3, beside what is there for a moment: two neighbouring units' gradients and parameters."""
    weight, state = (4, 8) if precision == "fp32" else (2, 12)
    for stage in range(4):
        config = published(
            "gpt-125m", parallel={"zero": stage, "dp": shards}, precision={"name": precision}
        )
        model, layout = config.model, ParallelLayout(dp=shards)
        padding = (-model.vocab_size % model.vocab_multiple) * model.hidden_size
        elements = param_count(model) + padding
        whole = [weight, 4, state]
        divided = {0: 0, 1: 1, 2: 2, 3: 3}[stage]
        kept, split = sum(whole[: 3 - divided]), sum(whole[3 - divided :])
        expected = kept * elements + split * elements / shards
        used = predict_states(config, layout, 0).device.total
        units = [s.numel for s in param_specs(model) if s.layer == 0]
        word = (model.vocab_size + model.max_seq_length) * model.hidden_size + padding
        transient = 4 * (stage >= 2) + weight * (stage == 3)
        slack = 64 * shards * (weight + 4 + state) * len(param_specs(model))
        assert expected <= used <= expected + transient * (word + 2 * sum(units)) + slack


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (4, 3), (3, 12)])
def test_state_is_divided_by_tensor_and_pipeline_ranks(tp: int, pp: int) -> None:
    """Against the fullest stage, added up by hand from the shapes."""
    config = published("gpt-125m", parallel={"pp": pp, "tp": tp})
    layout, model = ParallelLayout(tp=tp, pp=pp), config.model
    stages = [predict_states(config, layout, stage).device.total for stage in range(pp)]
    specs = param_specs(model)
    word, position = (s.numel for s in specs if s.edge == "first" and s.role == "embedding")
    block = sum(s.numel for s in specs if s.layer == 0)
    split = plan_stages(model, pp, 1, config.train.seq_length).split
    ends = [0] * pp
    ends[0] += word // tp + position
    ends[-1] += word // tp if pp > 1 else 0
    expected = [16 * (n * block / tp + end) for n, end in zip(split, ends, strict=True)]
    assert stages == pytest.approx(expected, rel=0.02)


def test_a_model_that_its_file_holds_needs_little_memory() -> None:
    config = published(
        "gpt-1.3b",
        parallel={"zero": 3, "offload": "nvme", "dp": 1, "offload_budget_mb": 512.0},
        precision={"name": "bf16"},
    )
    used = predict_states(config, ParallelLayout(), 0)
    elements = param_count(config.model)
    assert used.file == pytest.approx(12 * elements, rel=0.01)
    assert used.host.total == pytest.approx(4 * elements + 2**29, rel=0.01)
    assert used.device.total < 2.2e9


def test_more_than_a_gpu_has_is_refused() -> None:
    """An eighth of 175 B: weights of 2 bytes, gradients of 4, masters and two moments of 4."""
    config = compose(["model=gpt-175b", "parallel=tp8", "precision=bf16"])
    layout = resolve_layout(config)
    states = predict_states(config, layout, 0).device.total
    assert states == pytest.approx(175e9 / 8 * (2 + 4 + 12), rel=0.02)
    require_room(config, layout, 0, states)
    with pytest.raises(LayoutError, match=r"gpt-175b .* 39\d\.\d GB .*it has 80\.0 GB: more of"):
        require_room(config, layout, 0, 80 * 10**9)
