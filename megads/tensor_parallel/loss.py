"""Cross entropy of logits whose vocabulary is split over ranks; they are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megads.kernels.types import CrossEntropy
from megads.parallel.collectives import all_gather_dim0
from megads.parallel.mesh import Axis


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        vocab_size: int,
        axis: Axis,
        kernel: CrossEntropy,
    ) -> Tensor:
        first = axis.index * logits.shape[1]
        valid = min(max(vocab_size - first, 0), logits.shape[1])
        local = targets - first
        local = torch.where((local >= 0) & (local < valid), local, -1)
        # The caller's logits become exponentials here and the gradient in backward.
        stats = kernel.exponentiate_(logits, local, valid)
        log_total, target = stats.maximum + stats.total.log(), stats.target
        if axis.size > 1:
            # One collective: every rank's log sum, and the target logit of the one that has it.
            shares = all_gather_dim0(torch.stack([log_total, target])[None], axis)
            log_total, target = shares[:, 0].logsumexp(0), shares[:, 1].sum(0)
        losses = log_total - target
        ctx.save_for_backward(
            logits, local, mask, (stats.maximum - log_total).exp_(), losses.neg().exp_().sub_(1.0)
        )
        ctx.kernel = kernel
        return losses.sum() if mask is None else (losses * mask).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, local, mask, factor, at_target = ctx.saved_tensors
        scale = grad if mask is None else grad * mask
        gradient = ctx.kernel.gradient_(exponentials, factor * scale, local, at_target * scale)
        return gradient, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    vocab_size: int,
    axis: Axis,
    kernel: CrossEntropy,
) -> Tensor:
    """Sum over tokens of mask x -log softmax(logits)[target], an fp32 scalar, same on all ranks.

    `logits`: this rank's `[tokens, padded_vocab / tp]`, consumed: forward overwrites them with
    exponentials and backward with the gradient, so that no second buffer of that size exists (and
    backward runs once). Columns whose global index is >= `vocab_size` are padding and take no part
    in the softmax; a rank may hold nothing else. `targets`: global ids, int64 `[tokens]`; ids
    outside the vocabulary are allowed where the mask is 0. `mask`: fp32 `[tokens]`, None for ones.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, mask, vocab_size, axis, kernel)
