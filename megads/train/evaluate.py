"""Validation loss: the token-weighted mean over a fixed set of samples."""

from __future__ import annotations

from megads.train.build import RunParts
from megads.train.step import agree, count_loss_tokens


def evaluate(parts: RunParts) -> float:
    """Mean loss over the first `eval.steps` global batches of the validation split. Collective.

    Always the same samples, each at most once, whatever the layout; with fewer than asked for,
    all of them, and the last batch is filled up with samples that count nothing.
    """
    loader, train, dp = parts.valid_loader, parts.config.train, parts.mesh.dp
    assert loader is not None
    plan = loader.evaluation_plan(parts.config.eval.steps, train.global_batch_size)
    for module in parts.modules:
        module.eval()
    loss, tokens = 0.0, 0
    for index in range(plan.num_batches):
        microbatches = loader.evaluation_batches(
            plan,
            index,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp_size=dp.size,
            dp_index=dp.index,
        )
        tokens += count_loss_tokens(microbatches, parts.mesh)
        loss += agree(parts.executor.evaluate(microbatches), parts.mesh)[0]
    for module in parts.modules:
        module.train()
    return loss / tokens
