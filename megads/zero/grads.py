"""From autograd to summed gradients: sinks fill buckets, which are reduced as they fill up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megads.kernels.matmul import accumulate_product
from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.mesh import Mesh
from megads.zero.buckets import Bucket, Entry


class BucketSink:
    """Accumulates one parameter's gradient into its view of the bucket (see `GradSink`).

    The first contribution of a step overwrites the view, so buckets are never cleared. `uses` is
    how often one backward contributes: twice for a tied weight whose two uses are on this rank.
    """

    def __init__(self, view: Tensor, uses: int, reducer: BucketReducer) -> None:
        self.view, self.uses = view, uses
        self._reducer = reducer
        self.is_fresh = True

    def add(self, grad: Tensor) -> None:
        if self.is_fresh:
            self.view.copy_(grad)
        else:
            self.view.add_(grad)
        self._contributed()

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        accumulate_product(self.view, grad_output.t(), inputs, overwrite=self.is_fresh)
        self._contributed()

    def add_rows(self, rows: Tensor, grad: Tensor) -> None:
        if self.is_fresh:
            self.view.zero_()
        grad = grad.to(self.view.dtype)
        if self.view.is_cuda:  # index_add_ would add in any order there: another sum each run
            self.view.index_put_((rows,), grad, accumulate=True)
        else:
            self.view.index_add_(0, rows, grad)
        self._contributed()

    def _contributed(self) -> None:
        self.is_fresh = False
        self._reducer.contributed()


class BucketReducer:
    """Sums one bucket over data-parallel ranks, during the last backward or at the end.

    Only "plain" buckets are reduced early. The others first need sums over tp ranks or stages,
    which must come before the data-parallel reduction: afterwards each rank holds another part.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, *, sharded: bool) -> None:
        self.bucket, self._mesh, self._sharded = bucket, mesh, sharded
        self.sinks: list[BucketSink] = []
        self._missing = -1
        self._handle: Handle | None = None

    def reset(self) -> None:
        """A new step: whatever the bucket holds is old."""
        self._missing, self._handle = -1, None
        for sink in self.sinks:
            sink.is_fresh = True

    def expect_last_backward(self) -> None:
        """The next contributions are this step's last: reduce once all have come."""
        if self.bucket.plan.kind == "plain":
            self._missing = sum(sink.uses for sink in self.sinks)

    def contributed(self) -> None:
        if self._missing > 0:
            self._missing -= 1
            if self._missing == 0:
                self._start()

    def _clear_missing(self) -> None:
        """Zero the gradients of parameters that took no part in this step, once."""
        for sink in self.sinks:
            if sink.is_fresh:
                sink.view.zero_()
                sink.is_fresh = False

    def _start(self) -> None:
        self._clear_missing()
        reduce = (
            collectives.reduce_scatter_flat_async if self._sharded else collectives.all_reduce_async
        )
        self._handle = reduce(self.bucket.grads, self._mesh.dp)

    def sum_copies(self) -> None:
        """Add up what other tp ranks or the other end of the pipeline hold of the gradients."""
        self._clear_missing()
        kind = self.bucket.plan.kind
        if kind == "tied":
            collectives.all_reduce(self.bucket.grads, self._mesh.tied)
        elif kind == "tp_partial":
            collectives.all_reduce(self.bucket.grads, self._mesh.tp)
        elif kind == "kv_copies":
            self._sum_kv_rows()

    def _sum_kv_rows(self) -> None:
        tp = self._mesh.tp
        rows = [
            sink.view[slab.local_start : slab.local_start + slab.length]
            for sink, entry in zip(self.sinks, self.bucket.entries, strict=True)
            for slab in entry.spec.slabs(tp.size, tp.index)
            if slab.copies > 1
        ]
        flat = torch.cat([view.reshape(-1) for view in rows])
        collectives.all_reduce(flat, self._mesh.kv)
        for view, summed in zip(rows, flat.split([v.numel() for v in rows]), strict=True):
            view.copy_(summed.view_as(view))

    def start_if_pending(self) -> None:
        if self._handle is None:
            self._start()

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()


class GradientBuckets:
    """The `GradSync` of the optimizer: attaches sinks to parameters and reduces their buckets."""

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, *, sharded: bool) -> None:
        self._reducers = [BucketReducer(bucket, mesh, sharded=sharded) for bucket in buckets]
        for reducer in self._reducers:
            for entry, place in reducer.bucket.placed():
                uses = 2 if entry.spec.tied and mesh.pp.size == 1 else 1
                sink = BucketSink(reducer.bucket.grad_view(place, entry), uses, reducer)
                reducer.sinks.append(sink)
                _attach(entry, sink)

    def reset(self) -> None:
        for reducer in self._reducers:
            reducer.reset()

    def before_backward(self, chunk: int, microbatch: int, *, is_last: bool) -> None:
        if is_last:
            for reducer in self._reducers:
                if reducer.bucket.plan.chunk == chunk:
                    reducer.expect_last_backward()

    def finish(self) -> None:
        late = [r for r in self._reducers if r.bucket.plan.kind != "plain"]
        for reducer in late:
            reducer.sum_copies()
        for reducer in self._reducers:
            reducer.start_if_pending()
        for reducer in self._reducers:
            reducer.wait()


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
    entry.param.register_post_accumulate_grad_hook(take)
