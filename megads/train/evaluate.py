"""Validation loss: the token-weighted mean over a fixed set of samples."""

from __future__ import annotations

from megads.data.sampler import EvaluationPlan
from megads.parallel.layout import BatchPlan
from megads.train.build import RunParts
from megads.train.step import count_loss_tokens, reduce_loss


def evaluate(parts: RunParts) -> float:
    """Mean loss over the first `eval.steps` global batches of the validation split. Collective.

    Always the same samples, each at most once, whatever the layout; with fewer than asked for,
    all of them, and the last batch is filled up with samples that count nothing.
    """
    loader, train = parts.valid_loader, parts.config.train
    assert loader is not None
    dp = parts.mesh.dp.size
    batch = BatchPlan(
        train.micro_batch_size,
        train.global_batch_size // (train.micro_batch_size * dp),
        dp,
        train.seq_length,
    )
    plan = EvaluationPlan.make(loader.num_samples, parts.config.eval.steps, batch.global_batch_size)
    for module in parts.modules:
        module.eval()
    total = tokens = 0.0
    for index in range(plan.num_batches):
        start = index * batch.global_batch_size
        microbatches = loader.batches(start, batch, count_until=plan.samples)
        counted = count_loss_tokens(microbatches, parts)
        sums = reduce_loss(parts.executor.evaluate(microbatches), counted, parts)
        total, tokens = total + sums.loss, tokens + sums.tokens
    for module in parts.modules:
        module.train()
    return total / tokens
