"""Attention that stays inside the documents of packed sequences."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megads.kernels.types import AttentionPattern

Piece = tuple[slice, slice, slice]
"""Where a document lies in `[batch, heads, seq, ...]`: its row, all heads, its positions."""


class Documents:
    """The documents of one pass through a stage; what kernels make of them is made once.

    `starts`: int64 `[batch, seq]`, the position at which the document of each token begins. A query
    sees keys from there on; positions count from there.
    """

    def __init__(self, starts: Tensor) -> None:
        self.starts = starts
        self._made: Tensor | None = None

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The bias that is kept as long as the pass."""
        return (self._made,) if self._made is not None else ()

    def positions(self, first: int, stop: int) -> Tensor:
        """Positions within documents of the tokens `[first, stop)`, int64 `[batch, stop - first]`.

        Always memory of its own, of just this size.
        """
        return torch.arange(first, stop, device=self.starts.device) - self.starts[:, first:stop]

    def hidden(self) -> Tensor:
        """Whether a key lies in a document before the query's, bool `[batch, 1, seq, seq]`."""
        keys = torch.arange(self.starts.shape[1], device=self.starts.device)
        return (keys < self.starts[:, :, None])[:, None]

    def bias(self, pattern: AttentionPattern, dtype: torch.dtype) -> Tensor:
        """`pattern` and causality inside of documents, added to scores `[batch, heads, seq, seq]`.

        One head stands for all unless the pattern differs by head.
        """
        if self._made is None:
            seq, device = self.starts.shape[1], self.starts.device
            relative = pattern.relative_bias(seq, device, dtype)
            self._made = relative.masked_fill(self.hidden(), float("-inf"))
        return self._made

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Every document's place, row after row. On a GPU this would wait for the device."""
        batch, seq = self.starts.shape
        begins = (self.positions(0, seq) == 0).flatten().nonzero()[:, 0].tolist()
        ends = [*begins[1:], batch * seq]
        rows = [begin // seq for begin in begins]
        return [
            (slice(row, row + 1), slice(None), slice(begin - row * seq, end - row * seq))
            for row, begin, end in zip(rows, begins, ends, strict=True)
        ]


def piecewise_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, documents: Documents
) -> Tensor:
    """Causal attention of one document after another by torch's fused CPU kernel.

    `q`: `[batch, heads, seq, d]`, and so the result; `k`, `v`: `[batch, kv, seq, d]`. Pairs of
    tokens of different documents are not computed and no mask is kept: on one core, forward and
    backward of 1024 tokens in documents of 64 take a quarter of the time that one document of
    1024 takes, and with a mask half as much again.
    """
    seq, bias = q.shape[2], None
    if not pattern.is_plain_causal(seq):
        # It depends on distances alone, or differs from that by a constant per query: its first
        # corner is that of every document.
        bias = pattern.bias(seq, q.device, causal=False)
    return _Piecewise.apply(q, k, v, documents.pieces, bias)


def _corner(bias: Tensor | None, piece: Piece) -> Tensor | None:
    if bias is None:
        return None
    length = piece[2].stop - piece[2].start
    return bias[:, :, :length, :length].expand(1, -1, length, length)


class _Piecewise(torch.autograd.Function):
    """Keeps what the fused kernel keeps: its inputs, its result and a logsumexp per query."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], bias: Tensor | None
    ) -> Tensor:
        # The order in memory of the query, as the fused kernel has it for a whole sequence.
        out = torch.empty_like(q)
        batch, heads, seq, _ = q.shape
        sums = q.new_empty(batch, seq, heads, dtype=torch.promote_types(q.dtype, torch.float32))
        sums = sums.transpose(1, 2)
        for piece in pieces:
            out[piece], sums[piece] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[piece], k[piece], v[piece], 0.0, True, attn_mask=_corner(bias, piece)
            )
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.pieces, ctx.bias = pieces, bias
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, sums = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = [torch.empty_like(t) for t in (q, k, v)]
        for piece in ctx.pieces:
            saved = [t[piece] for t in (q, k, v, out, sums)]
            mask = _corner(ctx.bias, piece)
            parts = backward(grad[piece], *saved, 0.0, True, attn_mask=mask)
            for whole, part in zip(grads, parts, strict=True):
                whole[piece] = part
        return grads[0], grads[1], grads[2], None, None
