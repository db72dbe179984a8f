"""Validation loss: the token-weighted mean over a fixed set of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megads.config.schema import Config
from megads.data.loader import TokenLoader
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Mesh
from megads.train.build import RunParts
from megads.train.load import LanguageModel
from megads.train.step import agree, count_loss_tokens

LossSum = Callable[[list[MicroBatch]], Tensor]
"""The sum of the token losses of this rank's microbatches."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over all tokens that count, and over those of each source, by its name."""

    loss: float
    by_source: dict[str, float]
    tokens: int


def evaluate(parts: RunParts, stop_requested: Callable[[], bool]) -> Evaluation | None:
    """The loss of a model in training over at most `eval.steps` global batches. Collective.

    None, on all ranks, when one of them was asked to save and leave meanwhile.
    """
    assert parts.valid_loader is not None
    for module in parts.modules:
        module.eval()
    result = mean_loss(
        parts.valid_loader, parts.config, parts.mesh, parts.executor.evaluate, stop_requested
    )
    for module in parts.modules:
        module.train()
    return result


def evaluate_model(model: LanguageModel, loader: TokenLoader, config: Config) -> Evaluation:
    """The loss of a whole model over at most `eval.steps` global batches."""

    @torch.no_grad()
    def loss_sum(microbatches: list[MicroBatch]) -> Tensor:
        return torch.stack([model.stage(None, batch).double() for batch in microbatches]).sum()

    result = mean_loss(loader, config, Mesh.single(loader.device), loss_sum, lambda: False)
    assert result is not None
    return result


def mean_loss(
    loader: TokenLoader,
    config: Config,
    mesh: Mesh,
    loss_sum: LossSum,
    stop_requested: Callable[[], bool],
) -> Evaluation | None:
    """The token-weighted mean loss over the samples of an evaluation. Collective.

    Always the same samples, each at most once, whatever the layout; with fewer than asked for,
    all of them, and the last batch of a source is filled up with samples that count nothing.
    None as soon as a batch is done and `stop_requested()` on some rank.
    """
    train, dp = config.train, mesh.dp
    plan = loader.evaluation_plan(config.eval.steps, train.global_batch_size)
    losses: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for index, batch in enumerate(plan.batches):
        microbatches = loader.evaluation_batches(
            plan,
            index,
            micro_batch_size=train.micro_batch_size,
            dp_size=dp.size,
            dp_index=dp.index,
        )
        source = batch.source
        tokens[source] = tokens.get(source, 0) + count_loss_tokens(microbatches, mesh)
        loss, (stops,) = agree(loss_sum(microbatches), mesh, stop_requested())
        if stops:
            return None
        losses[source] = losses.get(source, 0.0) + loss
    total = sum(tokens.values())
    return Evaluation(
        sum(losses.values()) / max(1, total),
        {loader.names[n]: losses[n] / tokens[n] for n in losses if tokens[n]},
        total,
    )
