"""Every communication of a run: the only caller of torch.distributed's collectives.

All functions take an `Axis` and do nothing on an axis of size 1. Flat in-place forms exist for the
buckets of the optimizer: rank i owns chunk i of the buffer, `flat.view(axis.size, -1)[i]`.

Which primitive implements them depends on the backend. NCCL has native reduce-scatter and
all-gather. gloo's own are several times slower than its all-reduce and broadcast (160 MB between
two processes: reduce-scatter 1059 ms and all-gather 733 ms against all-reduce 170 ms and two
broadcasts 80 ms), so on gloo the flat forms are built from those two.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.mesh import Axis, Neighbour
from megads.parallel.phases import Phases

Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waitable(Protocol):
    """Work that torch.distributed has started."""

    def wait(self) -> object: ...


class Handle:
    """Something in flight. `wait` returns when its result may be read and its input reused."""

    def __init__(
        self, works: Sequence[Waitable | None] = (), phases: Phases | None = None, what: str = ""
    ) -> None:
        self._works, self._phases, self._what = works, phases, what

    def wait(self) -> None:
        if not self._works:
            return
        with self._phases.waiting(self._what) if self._phases is not None else nullcontext():
            for work in self._works:
                if work is not None:
                    work.wait()
        self._works = ()


def all_reduce(tensor: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
    """Reduce `tensor` over the axis in place; returns it."""
    if axis.size > 1:
        with axis.phases.waiting(f"all_reduce {axis.name}"):
            dist.all_reduce(tensor, _OPS[op], group=axis.group)
    return tensor


def reduced(tensor: Tensor, axis: Axis, op: Op = "sum") -> list[Any]:
    """The elements of a small 1-D tensor, reduced over the axis, on the host.

    On a GPU it is here that the host waits for other ranks, and not when the reduction is started.
    """
    if axis.size == 1:
        return tensor.tolist()
    with axis.phases.waiting(f"all_reduce {axis.name}"):
        dist.all_reduce(tensor, _OPS[op], group=axis.group)
        return tensor.tolist()


def all_reduce_async(tensor: Tensor, axis: Axis, op: Op = "sum") -> Handle:
    """Start an in-place reduction of `tensor`."""
    if axis.size == 1:
        return Handle()
    work = dist.all_reduce(tensor, _OPS[op], group=axis.group, async_op=True)
    return _handle([work], axis, "all_reduce")


def all_gather_dim0(tensor: Tensor, axis: Axis) -> Tensor:
    """Concatenate the axis members' equally shaped tensors along dim 0."""
    if axis.size == 1:
        return tensor
    out = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    with axis.phases.waiting(f"all_gather {axis.name}"):
        _all_gather_single(out, tensor.contiguous(), group=axis.group)
    return out


def all_gather_dim0_async(tensor: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Start `all_gather_dim0`; the tensor may be read after the handle's wait."""
    if axis.size == 1:
        return tensor, Handle()
    out = tensor.new_empty((axis.size * tensor.shape[0], *tensor.shape[1:]))
    work = _all_gather_single(out, tensor.contiguous(), group=axis.group, async_op=True)
    return out, _handle([work], axis, "all_gather")


def reduce_scatter_dim0(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum the members' tensors and return this rank's equal share of dim 0."""
    if axis.size == 1:
        return tensor
    out, handle = reduce_scatter_dim0_async(tensor, axis)
    handle.wait()
    return out


def reduce_scatter_dim0_async(tensor: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
    """Start `reduce_scatter_dim0`; the tensor may be read after the handle's wait."""
    if axis.size == 1:
        return tensor, Handle()
    if tensor.shape[0] % axis.size:
        raise ValueError(f"dim 0 of {tuple(tensor.shape)} is not a multiple of {axis.size}")
    out = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    work = _reduce_scatter_single(out, tensor.contiguous(), group=axis.group, async_op=True)
    return out, _handle([work], axis, "reduce_scatter")


def reduce_scatter_flat_async(flat: Tensor, axis: Axis) -> Handle:
    """Start summing `flat` so that this rank's chunk of it holds the sum.

    The other chunks are left undefined.
    """
    if axis.size == 1:
        return Handle()
    if _is_gloo(axis):
        return all_reduce_async(flat, axis)
    mine = flat.view(axis.size, -1)[axis.index]
    work = _reduce_scatter_single(mine, flat, group=axis.group, async_op=True)
    return _handle([work], axis, "reduce_scatter")


def all_gather_flat_async(flat: Tensor, axis: Axis) -> Handle:
    """Start filling `flat` from every member's own chunk of it."""
    if axis.size == 1:
        return Handle()
    chunks = flat.view(axis.size, -1)
    if _is_gloo(axis):
        works = [
            dist.broadcast(chunk, rank, group=axis.group, async_op=True)
            for chunk, rank in zip(chunks, axis.ranks, strict=True)
        ]
    else:
        mine = chunks[axis.index]
        works = [_all_gather_single(flat, mine, group=axis.group, async_op=True)]
    return _handle(works, axis, "all_gather")


def send_async(tensor: Tensor, to: Neighbour) -> Handle:
    """Start sending to an adjacent stage; keep `tensor` unchanged until the handle's wait."""
    return Handle([dist.isend(tensor, to.peer, group=to.group)], to.phases, "send")


def recv_async(tensor: Tensor, source: Neighbour) -> Handle:
    """Start receiving from an adjacent stage into `tensor`."""
    work = dist.irecv(tensor, source.peer, group=source.group)
    return Handle([work], source.phases, "receive")


def barrier(axis: Axis) -> None:
    """Return when every member has called it."""
    if axis.size > 1:
        with axis.phases.waiting(f"barrier {axis.name}"):
            dist.barrier(group=axis.group)


def all_gather_object(obj: Any, axis: Axis) -> list[Any]:
    """Every member's (small, picklable) object, in axis order. Only between ranks of one run."""
    if axis.size == 1:
        return [obj]
    out: list[Any] = [None] * axis.size
    with axis.phases.waiting(f"all_gather {axis.name}"):
        dist.all_gather_object(out, obj, group=axis.group)
    return out


def broadcast_object(obj: Any, axis: Axis, source_index: int = 0) -> Any:
    """The object of the member at `source_index`."""
    if axis.size == 1:
        return obj
    box = [obj]
    with axis.phases.waiting(f"broadcast {axis.name}"):
        dist.broadcast_object_list(box, axis.ranks[source_index], group=axis.group)
    return box[0]


def _handle(works: Sequence[Waitable | None], axis: Axis, operation: str) -> Handle:
    return Handle(works, axis.phases, f"{operation} {axis.name}")


def _is_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on `device`, so that wall-clock timings mean something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
