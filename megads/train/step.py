"""One training step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megads.optim.clip import clip_coefficient
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import BatchPlan
from megads.train.build import RunParts


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on all ranks.

    `loss` is the token-weighted mean over the global batch, `grad_norm` the norm before clipping.
    `applied` is False when the update was left out because one of them is not finite.
    `stop_requested`: some rank was asked to save and leave.
    """

    batch: BatchPlan
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    applied: bool
    stop_requested: bool


def train_step(parts: RunParts, *, stop_requested: bool = False) -> StepResult:
    """Run one global batch forward and backward and update the model. Collective.

    The learning rate follows the step count, so a skipped update consumes its samples and its
    place in the schedule.
    """
    state, optimizer, scaler = parts.state, parts.optimizer, parts.scaler
    batch = parts.batch_plan(state.samples)
    lr = parts.learning_rate(batch)
    microbatches = parts.loader.batches(
        state.samples,
        batch.global_batch_size,
        batch.micro_batch_size,
        batch.dp,
        parts.mesh.dp.index,
    )

    optimizer.zero_grad()
    tokens = count_loss_tokens(microbatches, parts)
    loss_sum = parts.executor.run(
        microbatches, optimizer.gradients, grad_scale=scaler.scale / max(tokens, 1)
    )
    optimizer.finish_gradients()

    norm = optimizer.grad_norm() / scaler.scale
    sums = reduce_loss(loss_sum, tokens, parts, stop_requested=stop_requested)
    loss_scale, applied = scaler.scale, math.isfinite(sums.mean) and scaler.ok(norm)
    if applied:
        clip = clip_coefficient(norm, parts.config.optim.clip)
        optimizer.scale_gradients(scaler.scale / clip)
        optimizer.step(lr)
    scaler.update(ok=applied)
    state.advance(batch)
    return StepResult(batch, sums.mean, norm, lr, loss_scale, applied, sums.stops > 0)


def count_loss_tokens(microbatches: list[MicroBatch], parts: RunParts) -> int:
    """Positions of the global batch that count in the loss, over all data-parallel ranks.

    A collective call: only some ranks may have microbatches with a mask.
    """
    mine = sum(
        m.labels.numel() if m.loss_mask is None else int(m.loss_mask.sum()) for m in microbatches
    )
    total = torch.tensor(mine, device=parts.mesh.device)
    return int(collectives.all_reduce(total, parts.mesh.dp))


class LossSums(NamedTuple):
    """Sums over a global batch: token losses, tokens counted, ranks that want to stop."""

    loss: float
    tokens: float
    stops: float

    @property
    def mean(self) -> float:
        return self.loss / self.tokens if self.tokens else 0.0


def reduce_loss(
    loss_sum: Tensor, tokens: int, parts: RunParts, *, stop_requested: bool = False
) -> LossSums:
    """The sums of the whole global batch, the same on every rank. Collective.

    `tokens` is already that of the global batch. Tensor-parallel peers of the last stage hold the
    same loss; one of them reports it.
    """
    mesh = parts.mesh
    values = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    if mesh.is_last_stage and mesh.tp.index == 0:
        values[0] = loss_sum.double()
        values[1] = tokens / mesh.dp.size
    values[2] = float(stop_requested)
    return LossSums(*collectives.all_reduce(values, mesh.world).tolist())
