"""Plain torch, written to be read: the definition of every op and the oracle of its tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.kernels.documents import Documents
from megads.kernels.types import ActivationKind, AttentionPattern, RowStatistics, dropout_mask


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm (Ba et al., 2016) over the last dim, or RMSNorm (Zhang, Sennrich, 2019) if there
    is no bias. Statistics are taken in fp32 whatever the dtype."""
    y = x.float()
    if bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """The MLP's nonlinearity; gated kinds take `[gate; up]` and return half the width.

    `geglu` gates with the exact GELU, `swiglu` with SiLU (Shazeer, 2020).
    """
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "relu":
        return F.relu(x)
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if kind == "swiglu" else F.gelu(gate)) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, head_dim: int, heads: int) -> Tensor:
    """Rotate the first `heads` heads of `x` `[tokens, width]` by position (Su et al., 2021).

    `cos`, `sin`: `[tokens, r / 2]`; dimension i of the first r of a head is paired with i + r / 2.
    `x` may be overwritten; use the result.
    """
    half = cos.shape[-1]
    y = x.view(x.shape[0], -1, head_dim)
    turned, rest = y[:, :heads], y[:, heads:]
    first, second, passed = turned.split([half, half, head_dim - 2 * half], dim=-1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat([first * c - second * s, second * c + first * s, passed], dim=-1)
    return torch.cat([turned, rest], dim=1).view_as(x)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AttentionPattern,
    *,
    documents: Documents | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """softmax(q k / sqrt(d) + bias) v, causal; query head h reads KV head h // (heads / kv).

    `q`: `[seq, batch, heads, d]`; `k`, `v`: `[seq, batch, kv, d]`; `[seq, batch, heads * d]` out.
    With `documents` a query sees the keys of its own alone.
    """
    seq, _, heads, width = q.shape
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(width)
    bias = pattern.bias(seq, q.device, causal=True)
    if documents is not None:
        bias = bias.masked_fill(documents.hidden(), float("-inf"))
    scores = scores + bias
    weights = scores.softmax(-1).to(q.dtype)
    if dropout:
        kept = dropout_mask(weights.shape, dropout, seed, q.device)
        weights = weights * kept / (1.0 - dropout)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def residual(x: Tensor, stream: Tensor | None, *, dropout: float = 0.0, seed: int = 0) -> Tensor:
    """`stream` + dropout(`x`), or dropout(`x`) alone. `x` may be overwritten; use the result."""
    if dropout:
        x = x * dropout_mask(x.shape, dropout, seed, x.device) / (1.0 - dropout)
    return x if stream is None else stream + x


class ReferenceCrossEntropy:
    """See `megads.kernels.types.CrossEntropy`."""

    def exponentiate_(self, logits: Tensor, targets: Tensor, valid: int) -> RowStatistics:
        x = logits[:, :valid].float()
        here = targets >= 0
        target = torch.zeros(len(x), device=x.device)
        target[here] = x[here, targets[here]]
        if valid:
            maximum = x.max(dim=1).values
        else:
            maximum = torch.full_like(target, float("-inf"))
        powers = torch.exp(x - maximum[:, None])
        logits.zero_()
        logits[:, :valid] = powers
        return RowStatistics(maximum, powers.sum(1), target)

    def gradient_(
        self, exponentials: Tensor, factor: Tensor, targets: Tensor, at_target: Tensor
    ) -> Tensor:
        here = (targets >= 0).nonzero()[:, 0]
        exponentials.copy_(exponentials.float() * factor[:, None])
        exponentials[here, targets[here]] = at_target[here].to(exponentials.dtype)
        return exponentials


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,
) -> None:
    """One AdamW update in place (Loshchilov, Hutter, 2019); `step` counts from 1.

    Gradients are divided by `grad_scale` first, and may be overwritten with the quotient.
    """
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = g if grad_scale is None else g / grad_scale
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt_().add_(eps)
        p.add_(-lr / (1 - beta1**step) * m / denominator)
