"""Stages filled with given weights, and their gradients put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.config.schema import KernelsConfig
from megads.kernels.api import select_kernels
from megads.models.families import param_specs
from megads.models.gpt import GPTStage
from megads.models.saved import SavedTensors
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from megads.parallel.sharding import ParamSpec
from tests.distributed import mesh_for


@dataclass(frozen=True)
class Chunk:
    """The part of a ChunkPlan that a stage reads."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


def whole(config: ModelConfig) -> Chunk:
    return Chunk(range(config.num_layers))


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Global tensors by canonical name, every one random, biases and norms too."""
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in param_specs(config):
        weight = torch.randn(spec.shape, generator=source) * 0.3
        weights[spec.name] = weight + 1 if spec.name.endswith("norm.weight") else weight
    return weights


def random_batch(config: ModelConfig, *, batch: int, seq: int, seed: int = 0) -> MicroBatch:
    """Random tokens and labels; the mask leaves different numbers of tokens per sequence."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (batch, seq + 1), generator=source)
    mask = (torch.rand(batch, seq, generator=source) < 0.7).float()
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)


def local_piece(spec: ParamSpec, full: Tensor, tp: int, index: int) -> Tensor:
    """What tensor-parallel rank `index` holds of a global tensor; padding is NaN, to be ignored."""
    if spec.tp_dim is None:
        return full.clone()
    shape = list(full.shape)
    shape[spec.tp_dim] = spec.local_shape(tp)[spec.tp_dim]
    local = torch.full(shape, float("nan"), dtype=full.dtype)
    for slab in spec.slabs(tp, index):
        piece = full.narrow(spec.tp_dim, slab.start, slab.length)
        local.narrow(spec.tp_dim, slab.local_start, slab.length).copy_(piece)
    return local


def make_stage(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    mesh: Mesh,
    *,
    chunk: Chunk | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
    recompute_layers: int | None = None,
    saved: SavedTensors | None = None,
    kernels: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> GPTStage:
    """A stage with the given global weights. Vocabulary padding is filled with large values, which
    must not be seen by anything."""
    chosen, _ = select_kernels(KernelsConfig(name=kernels), "cpu", dtype)
    stage = GPTStage(
        config,
        chunk or whole(config),
        mesh,
        chosen,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        recompute_layers=recompute_layers,
        saved=saved,
        dtype=dtype,
        device="cpu",
    )
    with torch.no_grad():
        for name, param in stage.named_parameters():
            spec = stage.specs[name]
            piece = local_piece(spec, weights[spec.name], mesh.tp.size, mesh.tp.index)
            param.copy_(piece.nan_to_num(nan=50.0))
    return stage


@dataclass
class Outcome:
    """What one rank computed."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def run_rank(
    rank: int,
    world_size: int,
    config: ModelConfig,
    weights: dict[str, Tensor],
    batch: MicroBatch,
    options: dict[str, Any],
) -> Outcome:
    """Worker function: logits, loss and local gradients at tp = world size."""
    mesh = Mesh.single()
    if world_size > 1:
        mesh = mesh_for(ParallelLayout(tp=world_size), rank, config.num_kv_heads)
    stage = make_stage(config, weights, mesh, **options)
    with torch.no_grad():
        logits = stage.logits(None, batch)
    loss = stage(None, batch)
    loss.backward()
    grads = {stage.specs[n].name: p.grad for n, p in stage.named_parameters()}
    return Outcome(logits, loss.detach(), grads)  # type: ignore[arg-type]


def with_dropout(
    rank: int,
    world_size: int,
    config: ModelConfig,
    weights: dict[str, Tensor],
    batches: list[MicroBatch],
    options: dict[str, Any],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and summed gradients of two microbatches, both forward passes first, as a pipeline
    interleaves them; the global generator is moved on between."""
    mesh = mesh_for(ParallelLayout(tp=world_size), rank) if world_size > 1 else Mesh.single()
    stage = make_stage(config, weights, mesh, **options)
    losses = []
    for batch in batches:
        stage.dropout_rng.seed(1234, 7, batch.index)
        losses.append(stage(None, batch))
        torch.rand(3)
    for loss in losses:
        loss.backward()
    grads = {stage.specs[n].name: p.grad for n, p in stage.named_parameters()}
    return [loss.detach() for loss in losses], grads  # type: ignore[return-value]


def assemble_gradients(
    config: ModelConfig, outcomes: Sequence[Outcome], *, sequence_parallel: bool
) -> dict[str, Tensor]:
    """Global gradients from the ranks' local ones, summed where the specs declare summands."""
    tp = len(outcomes)
    full = {}
    for spec in param_specs(config):
        pieces = [outcome.grads[spec.name] for outcome in outcomes]
        kind = spec.tp_gradient
        if kind == "partial_if_sequence_parallel":
            kind = "partial" if sequence_parallel else "identical"
        if kind == "sharded":
            total = torch.zeros(spec.shape)
            for index, piece in enumerate(pieces):
                for slab in spec.slabs(tp, index):
                    assert spec.tp_dim is not None
                    mine = piece.narrow(spec.tp_dim, slab.local_start, slab.length)
                    total.narrow(spec.tp_dim, slab.start, slab.length).add_(mine)
        elif kind == "partial":
            total = torch.stack(pieces).sum(0)
        else:
            total = pieces[0]
            for piece in pieces[1:]:
                torch.testing.assert_close(piece, total, rtol=0, atol=0)
        full[spec.name] = total
    return full


def assert_gradients_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 2e-5
) -> None:
    """Every tensor within `tolerance` of its largest element."""
    assert actual.keys() == expected.keys()
    wrong = {}
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        if not error < tolerance:
            wrong[name] = float(error)
    assert not wrong, wrong
