"""torch's own fused paths, and in-place forms where torch would allocate: the default backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megads.kernels import reference
from megads.kernels.documents import Documents, piecewise_attention
from megads.kernels.types import ActivationKind, AttentionPattern, RowStatistics, dropout_mask

_CHUNK_ELEMENTS = {"cpu": 1 << 19}
"""Logits handled at a time, by device type: on a CPU few enough to stay in cache over passes."""
_CHUNK_ELEMENTS_OTHERWISE = 1 << 26


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm, or RMSNorm if there is no bias."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """torch has no fused CPU kernel for it; its composite keeps three tensors of x's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = mean_square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, wide = x * scale, grad.float()
        product = wide * normed
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        inner = torch.mul(wide, weight, out=product).sub_(normed.mul_(mean))
        return inner.mul_(scale).to(x.dtype), grad_weight, None


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """The MLP's nonlinearity; gated kinds keep nothing but their input for the backward pass."""
    if kind in ("swiglu", "geglu"):
        return _Gated.apply(x, kind)
    return reference.activation(x, kind)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if kind == "swiglu" else F.gelu(gate)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        into_gate = grad * up
        if ctx.kind == "swiglu":
            torch.mul(grad, F.silu(gate), out=grad_up)
            torch.ops.aten.silu_backward.grad_input(into_gate, gate, grad_input=grad_gate)
        else:
            torch.mul(grad, F.gelu(gate), out=grad_up)
            torch.ops.aten.gelu_backward.grad_input(into_gate, gate, grad_input=grad_gate)
        return grad_x, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, head_dim: int, heads: int) -> Tensor:
    """Rotation in place: nothing of x's size is kept, and the gradient is rotated back in place."""
    return _Rotary.apply(x, cos, sin, head_dim, heads)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int) -> None:
    half = cos.shape[-1]
    turned = x.view(x.shape[0], -1, head_dim)[:, :heads]
    first, second = turned[..., :half], turned[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    old_first_part = first * s
    first.mul_(c).addcmul_(second, s, value=-1)
    second.mul_(c).add_(old_first_part)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.head_dim, ctx.heads = head_dim, heads
        ctx.mark_dirty(x)
        _rotate_(x, cos, sin, head_dim, heads)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        # Nobody else reads the gradient: x has one consumer, and slices of it meet in a fresh sum.
        grad = grad.contiguous()
        _rotate_(grad, cos, -sin, ctx.head_dim, ctx.heads)
        return grad, None, None, None, None


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
    """scaled_dot_product_attention; KV heads are repeated in memory only where no fused kernel of
    a GPU takes fewer of them, that is with a bias or in fp32.

    On a CPU its flash kernel takes a bias beside causality, so that ALiBi costs a row per head, and
    is called for one document after another. With dropout it has no fused CPU kernel; the reference
    is used there. Elsewhere documents are a mask, made once per pass.
    """
    seq, on_cpu = q.shape[0], q.device.type == "cpu"
    if dropout and on_cpu:
        return reference.attention(
            q, k, v, pattern, documents=documents, dropout=dropout, seed=seed
        )
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if documents is not None and on_cpu:
        out = piecewise_attention(q, k, v, pattern, documents)
    elif documents is not None:
        out = _seeded_sdpa(
            q, k, v, documents.bias(pattern, q.dtype), dropout, seed, grouped=grouped
        )
    elif pattern.is_plain_causal(seq):
        out = _seeded_sdpa(q, k, v, None, dropout, seed, grouped=grouped)
    elif on_cpu:
        bias = pattern.bias(seq, q.device, causal=False).expand(1, -1, seq, seq)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, attn_mask=bias
        )
    else:
        bias = pattern.relative_bias(seq, q.device, q.dtype)
        out = _seeded_sdpa(q, k, v, bias, dropout, seed, grouped=grouped)
    return out.permute(2, 0, 1, 3).flatten(2)


def _seeded_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout: float,
    seed: int,
    *,
    grouped: bool,
) -> Tensor:
    if grouped and q.device.type != "cpu" and (bias is not None or q.dtype == torch.float32):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    if not dropout:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )
    # The fused kernels take their randomness from the device's default generator only.
    with torch.random.fork_rng(devices=[q.device], device_type=q.device.type):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=bias is None, enable_gqa=grouped
        )


def residual(x: Tensor, stream: Tensor | None, *, dropout: float = 0.0, seed: int = 0) -> Tensor:
    """`stream` + dropout(`x`), in the memory of `x`; a mask byte per element is kept."""
    if dropout:
        x = _Dropout.apply(x, dropout, seed)
    return x if stream is None else x.add_(stream)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        kept = dropout_mask(x.shape, probability, seed, x.device)
        ctx.save_for_backward(kept)
        ctx.scale = 1.0 / (1.0 - probability)
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (grad * kept).mul_(ctx.scale), None, None


class InPlaceCrossEntropy:
    """See `megads.kernels.types.CrossEntropy`. Exponentials are taken once, in fp32, and stored in
    the logits' own memory and dtype; the pass back is one multiplication.

    In fp16 they are stored times 2^15, which fills its range: small probabilities would be lost
    before the loss scale could save them."""

    def exponentiate_(self, logits: Tensor, targets: Tensor, valid: int) -> RowStatistics:
        tokens = logits.shape[0]
        new = logits.new_empty
        maximum = new(tokens, dtype=torch.float32).fill_(float("-inf"))
        total = new(tokens, dtype=torch.float32).zero_()
        if valid < logits.shape[1]:
            logits[:, valid:].zero_()
        if not valid:
            return RowStatistics(maximum, total, torch.zeros_like(total))
        target = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        target.masked_fill_(targets < 0, 0.0)
        for rows in _row_chunks(logits, valid):
            chunk = logits[rows, :valid]
            wide = chunk.float()
            top = torch.amax(wide, dim=1, out=maximum[rows])
            wide.sub_(top[:, None]).exp_()
            torch.sum(wide, dim=1, out=total[rows])
            if wide is not chunk:
                chunk.copy_(wide.mul_(_stored_scale(logits.dtype)))
        return RowStatistics(maximum, total, target)

    def gradient_(
        self, exponentials: Tensor, factor: Tensor, targets: Tensor, at_target: Tensor
    ) -> Tensor:
        factor = factor / _stored_scale(exponentials.dtype)
        for rows in _row_chunks(exponentials, exponentials.shape[1]):
            exponentials[rows].mul_(factor[rows, None])
        column = targets.clamp(min=0)[:, None]
        here = (targets >= 0)[:, None]
        value = at_target[:, None].to(exponentials.dtype)
        value = torch.where(here, value, exponentials.gather(1, column))
        return exponentials.scatter_(1, column, value)


def _stored_scale(dtype: torch.dtype) -> float:
    return 2.0**15 if dtype == torch.float16 else 1.0


def _row_chunks(matrix: Tensor, columns: int) -> list[slice]:
    """Cut the rows so that a chunk has about the device's number of elements."""
    elements = _CHUNK_ELEMENTS.get(matrix.device.type, _CHUNK_ELEMENTS_OTHERWISE)
    rows = max(1, elements // max(1, columns))
    return [slice(start, start + rows) for start in range(0, matrix.shape[0], rows)]


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
    """torch's fused AdamW; same meaning as the reference."""
    if not params:
        return
    count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [count] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=None,
    )
