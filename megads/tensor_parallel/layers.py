"""Linear layers and the embedding, split over a tensor-parallel axis.

Activations are matrices `[tokens, width]`; under sequence parallelism `[tokens / tp, width]`
outside of the column-row pairs. Layers whose weight has a `grad_sink` write its gradient there.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megads.kernels.matmul import addmm, mm
from megads.parallel.collectives import (
    all_gather_dim0,
    all_gather_dim0_async,
    all_reduce_async,
    reduce_scatter_dim0_async,
)
from megads.parallel.gradsync import sink_of
from megads.parallel.mesh import Axis
from megads.parallel.sharding import ParamSpec
from megads.tensor_parallel import regions

_ALONE = Axis("tp")


def new_parameter(
    spec: ParamSpec, axis: Axis, *, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    """An uninitialized parameter of the shape that one rank of `axis` holds of `spec`."""
    return nn.Parameter(torch.empty(spec.local_shape(axis.size), dtype=dtype, device=device))


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose backward overlaps the collective on the input gradient with the weight
    gradient. Under sequence parallelism only the local shard of x is kept, and gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        enter: Literal["copy", "gather"],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.gathered = axis, enter == "gather"
        ctx.sink = sink_of(weight)
        if ctx.gathered:
            x = all_gather_dim0(x, axis)
        if bias is None:
            return mm(x, weight.t())
        return addmm(bias, x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering = reducing = None
        if ctx.gathered and needs_weight:
            x, gathering = all_gather_dim0_async(x, ctx.axis)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = full = mm(grad, weight)
            if ctx.gathered:
                grad_x, reducing = reduce_scatter_dim0_async(full, ctx.axis)
            else:
                reducing = all_reduce_async(full, ctx.axis)
        if needs_weight:
            if gathering is not None:
                gathering.wait()
            if ctx.sink is not None:
                ctx.sink.add_outer(grad, x)
            else:
                grad_weight = mm(grad.t(), x)
        if needs_bias:
            grad_bias = grad.sum(0)
        if reducing is not None:
            reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *, sequence_parallel: bool
) -> Tensor:
    """Multiply by this rank's rows of a weight split along its output dim.

    `x`: `[tokens, in]`, the same on all ranks, or with `sequence_parallel` this rank's
    `[tokens / tp, in]`; `weight`: `[out / tp, in]`; `[tokens, out / tp]` out. Equal to
    `F.linear(copy(x), ...)`, or `F.linear(gather(x), ...)`, of `megads.tensor_parallel.regions`.
    """
    enter = "gather" if sequence_parallel and axis.size > 1 else "copy"
    return _Linear.apply(x, weight, bias, axis, enter)


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *, sequence_parallel: bool
) -> Tensor:
    """Multiply by this rank's columns of a weight split along its input dim, and sum over ranks.

    `x`: `[tokens, in / tp]`; `weight`: `[out, in / tp]`; `bias`: `[out]`, added once;
    `[tokens, out]` out, the same on all ranks, or with `sequence_parallel` `[tokens / tp, out]`.
    """
    if axis.size == 1:
        return _Linear.apply(x, weight, bias, _ALONE, "copy")
    partial = _Linear.apply(x, weight, None, _ALONE, "copy")
    leave = regions.reduce_scatter if sequence_parallel else regions.reduce
    out = leave(partial, axis)
    return out if bias is None else out.add_(bias)


class _ParallelLinear(nn.Module):
    def __init__(
        self,
        weight: ParamSpec,
        bias: ParamSpec | None,
        axis: Axis,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = new_parameter(weight, axis, dtype=dtype, device=device)
        self.bias = (
            new_parameter(bias, axis, dtype=dtype, device=device) if bias is not None else None
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer split along its output dim; see `column_parallel`."""

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(
            x, self.weight, self.bias, self.axis, sequence_parallel=self.sequence_parallel
        )


class RowParallelLinear(_ParallelLinear):
    """A linear layer split along its input dim; see `row_parallel`."""

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(
            x, self.weight, self.bias, self.axis, sequence_parallel=self.sequence_parallel
        )


class _Lookup(torch.autograd.Function):
    """Rows of this rank's share of an embedding; zero where another rank holds the row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, first: int | None) -> Tensor:
        outside = None
        if first is not None:
            ids = ids - first
            outside = ((ids < 0) | (ids >= weight.shape[0]))[:, None]
            ids = torch.where(outside[:, 0], ids.remainder(weight.shape[0]), ids)
        ctx.save_for_backward(ids, outside)
        ctx.shape, ctx.sink = weight.shape, sink_of(weight)
        rows = weight.index_select(0, ids)
        return rows if outside is None else rows.masked_fill_(outside, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        ids, outside = ctx.saved_tensors
        if outside is not None:
            # Rows held elsewhere add zero to some row: no data-dependent shapes, and no row to
            # which a GPU would have to add most of the tokens one after the other.
            grad = grad.masked_fill(outside, 0)
        if ctx.sink is not None:
            ctx.sink.add_rows(ids, grad)
            return None, None, None
        dense = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.shape[0], -1, False)
        return dense, None, None


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the axis; a rank holds a run of the vocabulary."""

    def __init__(
        self,
        weight: ParamSpec,
        axis: Axis,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = new_parameter(weight, axis, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` `[tokens]`, all below the vocabulary size -> `[tokens, hidden]` on every rank, or
        `[tokens / tp, hidden]` under sequence parallelism."""
        if self.axis.size == 1:
            return _Lookup.apply(self.weight, ids, None)
        rows = _Lookup.apply(self.weight, ids, self.axis.index * self.weight.shape[0])
        leave = regions.reduce_scatter if self.sequence_parallel else regions.reduce
        return leave(rows, self.axis)
