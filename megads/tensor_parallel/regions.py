"""Where activations cross between replicated, partial and sequence-sharded, with their gradients.

Each region is a pair of collectives, one the transpose of the other (Shoeybi et al., 2019;
Korthikanti et al., 2022). On an axis of size 1 they return their argument and leave no node in the
graph.

| region           | forward                      | backward                     |
|------------------|------------------------------|------------------------------|
| `copy`           | nothing                      | sum over the axis            |
| `reduce`         | sum over the axis            | nothing                      |
| `gather`         | concatenate along dim 0      | sum, keep own share of dim 0 |
| `reduce_scatter` | sum, keep own share of dim 0 | concatenate along dim 0      |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.parallel.collectives import all_gather_dim0, all_reduce, reduce_scatter_dim0
from megads.parallel.mesh import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather_dim0(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_dim0(grad, ctx.axis), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter_dim0(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_dim0(grad, ctx.axis), None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Enter a region where every rank works on the same `x` with its own weights."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Leave it: sum the ranks' partial results, in the memory of `x`."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather(x: Tensor, axis: Axis) -> Tensor:
    """Enter it from sequence-sharded activations: `[tokens / n, ...]` -> `[tokens, ...]`."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Leave it to sequence-sharded activations: `[tokens, ...]` -> `[tokens / n, ...]`."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)
