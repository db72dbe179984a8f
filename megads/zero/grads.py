"""From autograd to summed gradients: sinks fill buckets, which are reduced unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megads.kernels.matmul import accumulate_product
from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.mesh import Axis, Mesh
from megads.zero.buckets import Bucket, Copies, Entry


class BucketSink:
    """Accumulates one parameter's gradient into its view of the bucket (see `GradSink`).

    The first contribution after a reset overwrites the view, so buckets are never cleared.
    """

    def __init__(self, view: Tensor, bucket: Bucket) -> None:
        self.view, self._bucket = view, bucket
        self.is_fresh = True

    def add(self, grad: Tensor) -> None:
        if self._begin():
            self.view.copy_(grad)
        else:
            self.view.add_(grad)

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        accumulate_product(self.view, grad_output.t(), inputs, overwrite=self._begin())

    def add_rows(self, rows: Tensor, grad: Tensor) -> None:
        if self._begin():
            self.view.zero_()
        grad = grad.to(self.view.dtype)
        if self.view.is_cuda:  # index_add_ would add in any order there: another sum each run
            self.view.index_put_((rows,), grad, accumulate=True)
        else:
            self.view.index_add_(0, rows, grad)

    def clear_if_fresh(self) -> None:
        """Zero the gradient of a parameter that took no part, once."""
        if self._begin():
            self.view.zero_()

    def _begin(self) -> bool:
        """Whether what the view holds is old."""
        self._bucket.grads.acquire()
        was_fresh, self.is_fresh = self.is_fresh, False
        return was_fresh


class BucketReducer:
    """Sums one bucket over data-parallel ranks into this rank's shard of it.

    `shard` is the fp32 gradient of the range that this rank updates: a part of the bucket itself,
    or with `moves` memory of its own, maybe on the host, to which each reduction is added. The
    bucket's memory is then needed only from the first contribution to the end of the reduction.
    """

    def __init__(
        self, bucket: Bucket, mesh: Mesh, shard: Tensor, *, moves: bool, keeps: bool
    ) -> None:
        self.bucket, self.shard = bucket, shard
        self.sinks: list[BucketSink] = []
        self._mesh, self._moves, self._keeps = mesh, moves, keeps
        self._range = slice(*bucket.plan.part(mesh.shard.size, mesh.shard.index))
        self._shard_is_fresh = True
        self._handle: Handle | None = None

    def reset(self) -> None:
        """A new step: whatever the bucket and the shard hold is old."""
        self._handle, self._shard_is_fresh = None, True
        self._forget()

    def start(self) -> None:
        """All contributions are there: begin to sum them."""
        for sink in self.sinks:
            sink.clear_if_fresh()
        flat, mesh = self.bucket.grads.tensor, self._mesh
        if mesh.shard.size == 1:
            self._handle = collectives.all_reduce_async(flat, mesh.replica)
        else:
            self._handle = collectives.reduce_scatter_flat_async(flat, mesh.shard)

    def complete(self) -> None:
        """Wait for the sum and take it into the shard."""
        assert self._handle is not None
        self._handle.wait()
        own = self.bucket.grads.tensor[self._range]
        if self._mesh.shard.size > 1:
            collectives.all_reduce(own, self._mesh.replica)
        if not self._moves:
            return
        if self._shard_is_fresh:
            self.shard.copy_(own)
        else:
            self.shard.add_(own.to(self.shard.device))
        self._shard_is_fresh = False
        if not self._keeps:
            self.bucket.grads.release()
            self._forget()

    def _forget(self) -> None:
        for sink in self.sinks:
            sink.is_fresh = True

    def copies(self, kind: Copies) -> Iterator[Tensor]:
        """The runs of the shard to which holders of copies of that kind contribute too."""
        first, last = self._range.start, self._range.stop
        for entry, place in self.bucket.placed():
            if entry.copies != kind:
                continue
            runs = [(0, place.numel)]
            if kind == "kv":
                width = place.numel // entry.param.shape[0]
                runs = [
                    (s.local_start * width, (s.local_start + s.length) * width)
                    for s in entry.spec.slabs(self._mesh.tp.size, self._mesh.tp.index)
                    if s.copies > 1
                ]
            for start, stop in runs:
                low, high = max(first, place.start + start), min(last, place.start + stop)
                if low < high:
                    yield self.shard[low - first : high - first]


class GradientBuckets:
    """The `GradSync` of the optimizer: attaches sinks to parameters and reduces their buckets.

    A bucket is reduced when the backward of the unit after its last one begins, or has ended:
    at the same points on all ranks, whichever parameters took part. `every_backward`: in each
    microbatch (ZeRO stage 2 and 3) instead of only in the last. `promptly`: take in the sums of a
    unit before those of the next one are begun, so that their memory is free or on the host soon.
    """

    def __init__(
        self,
        reducers: Sequence[BucketReducer],
        mesh: Mesh,
        *,
        every_backward: bool,
        promptly: bool,
    ) -> None:
        self._reducers, self._mesh = list(reducers), mesh
        self._every, self._promptly = every_backward, promptly
        self._waiting: list[BucketReducer] = []  # of the chunk whose backward runs, in order
        self._started: list[BucketReducer] = []
        for reducer in self._reducers:
            for entry in reducer.bucket.entries:
                sink = BucketSink(entry.grad, reducer.bucket)
                reducer.sinks.append(sink)
                _attach(entry, sink)

    def reset(self) -> None:
        """Forget the gradients of the step before."""
        for reducer in self._reducers:
            reducer.reset()

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        if is_last or self._every:
            self._waiting = [r for r in self._reducers if r.bucket.plan.chunk == chunk]

    def before_unit(self, unit: str) -> None:
        """The backward of `unit` begins: buckets of later units alone are full."""
        for position, reducer in enumerate(self._waiting):
            if unit in reducer.bucket.plan.units:
                self._start(position)
                return

    def after_backward(self, chunk: int) -> None:
        self._start(len(self._waiting))
        if self._promptly:
            self._complete()

    def finish(self) -> None:
        """All backwards have run: complete the sums, those over copies included. Collective."""
        self._complete()
        axes: dict[Copies, Axis] = {
            "tied": self._mesh.tied,
            "tp_partial": self._mesh.tp,
            "kv": self._mesh.kv,
        }
        for kind, axis in axes.items():
            _sum_over(axis, [v for r in self._reducers for v in r.copies(kind)], self._mesh.device)

    def _start(self, count: int) -> None:
        """Begin to reduce the first `count` of the waiting buckets."""
        begun, self._waiting = self._waiting[:count], self._waiting[count:]
        if begun and self._promptly:
            self._complete()
        for reducer in begun:
            reducer.start()
        self._started += begun

    def _complete(self) -> None:
        for reducer in self._started:
            reducer.complete()
        self._started = []


def _sum_over(axis: Axis, runs: Sequence[Tensor], device: torch.device) -> None:
    """Sum what the members of the axis hold in the same runs, with one message for all."""
    if axis.size == 1 or not runs:
        return
    flat = torch.cat(list(runs)).to(device)
    collectives.all_reduce(flat, axis)
    for run, total in zip(runs, flat.split([run.numel() for run in runs]), strict=True):
        run.copy_(total)


def _attach(entry: Entry, sink: BucketSink) -> None:
    """Route the parameter's gradient into `sink`, whether a layer writes it or autograd does.

    The hook finds the sink through the parameter: the garbage collector does not see what a hook
    of this kind holds, and would never free the parameter.
    """

    def take(param: nn.Parameter) -> None:
        grad, param.grad = param.grad, None
        if grad is not None:
            param.grad_sink.add(grad)  # type: ignore[attr-defined]

    entry.param.grad_sink = sink  # type: ignore[attr-defined]
    if entry.param.requires_grad:
        entry.param.register_post_accumulate_grad_hook(take)
