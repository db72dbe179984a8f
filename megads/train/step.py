"""One training step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megads.optim.clip import clip_coefficient
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import BatchPlan
from megads.parallel.mesh import Mesh
from megads.train.build import RunParts
from megads.train.guard import Verdict


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on all ranks.

    `loss` is the token-weighted mean over the global batch, `grad_norm` the norm before clipping.
    Unless `verdict` is good the update was left out (`applied` is False).
    `stop_requested`: some rank was asked to save and leave. `memory_news`: some rank uses more
    memory than before.
    """

    batch: BatchPlan
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    verdict: Verdict
    stop_requested: bool
    memory_news: bool

    @property
    def applied(self) -> bool:
        return self.verdict == "good"


def train_step(parts: RunParts, *, stop_requested: bool = False) -> StepResult:
    """Run one global batch forward and backward and update the model. Collective.

    The learning rate follows the step count, so a skipped update consumes its samples and its
    place in the schedule.
    """
    state, optimizer, scaler = parts.state, parts.optimizer, parts.scaler
    phases = parts.mesh.phases
    batch = parts.batch_plan(state.samples)
    lr = parts.learning_rate(batch)
    with phases("data"):
        microbatches = parts.microbatches(batch)
    tokens = count_loss_tokens(microbatches, parts.mesh)
    loss_scale = scaler.scale

    optimizer.zero_grad()
    loss_sum = parts.executor.run(
        microbatches, optimizer.gradients, grad_scale=loss_scale / max(tokens, 1)
    )
    with phases("gradients"):
        optimizer.finish_gradients()
        norm = optimizer.grad_norm() / loss_scale
    loss, (stop, news) = agree(loss_sum, parts.mesh, stop_requested, parts.memory.has_news())
    loss /= max(tokens, 1)
    verdict = parts.guard.judge(loss, norm)
    if verdict == "good":
        clip = clip_coefficient(norm, parts.config.optim.clip)
        with phases("optimizer"):
            optimizer.step(lr, grad_divisor=loss_scale / clip)
    if verdict == "spike":
        scaler.skip()
    else:
        scaler.update(ok=verdict == "good")
    state.advance(batch)
    return StepResult(batch, loss, norm, lr, loss_scale, verdict, stop, news)


def count_loss_tokens(microbatches: list[MicroBatch], mesh: Mesh) -> int:
    """Positions of the global batch that count in the loss; 0 if every one is masked. Collective.

    The loss and its gradient are sums divided by this number, never means of means.
    """
    mine = sum(
        m.labels.numel() if m.loss_mask is None else int(m.loss_mask.sum()) for m in microbatches
    )
    return int(collectives.reduced(torch.tensor([mine], device=mesh.device), mesh.dp)[0])


def agree(loss_sum: Tensor, mesh: Mesh, *words: bool) -> tuple[float, list[bool]]:
    """The global batch's sum of token losses, and of each word whether a rank says it. Collective.

    Tensor-parallel peers of the last stage hold the same sum; one of them reports it.
    """
    values = torch.zeros(1 + len(words), dtype=torch.float64, device=mesh.device)
    if mesh.is_last_stage and mesh.tp.index == 0:
        values[0] = loss_sum.double()
    values[1:] = torch.tensor(words, dtype=torch.float64)
    loss, *said = collectives.reduced(values, mesh.world)
    return loss, [number > 0 for number in said]
