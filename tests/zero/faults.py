"""Faults of ZeRO that keep a falling, plausible loss. Each returns how to undo it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.mesh import Axis, Mesh
from megads.zero import optimizer
from megads.zero.gather import ParamGatherer
from megads.zero.grads import BucketReducer


def spoil(rank: int, fault: str) -> Callable[[], None]:
    """Put a fault in on this rank."""
    return FAULTS[fault]()


def patched(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    return lambda: setattr(owner, name, original)


def no_reduction() -> Callable[[], None]:
    """Every rank keeps its own gradients."""

    def start(self: BucketReducer) -> None:
        for sink in self.sinks:
            sink.clear_if_fresh()
        self._handle = Handle()

    return patched(BucketReducer, "start", start)


def last_microbatch_only() -> Callable[[], None]:
    """The shard is overwritten by each reduction."""
    original = BucketReducer.complete

    def complete(self: BucketReducer) -> None:
        self._shard_is_fresh = True
        original(self)

    return patched(BucketReducer, "complete", complete)


def stale_parameters() -> Callable[[], None]:
    """What was gathered before an update is used after it."""
    return patched(ParamGatherer, "release", lambda self: None)


def no_replica_sum() -> Callable[[], None]:
    """The sum stays within the shard group."""
    original = collectives.all_reduce

    def all_reduce(tensor: Tensor, axis: Axis, *args: Any) -> Tensor:
        return tensor if axis.name == "replica" else original(tensor, axis, *args)

    return patched(collectives, "all_reduce", all_reduce)


def own_norm() -> Callable[[], None]:
    """Each rank clips by its own shards."""
    original = optimizer.global_norm
    return patched(optimizer, "global_norm", lambda unique, mesh: original(unique, Mesh.single()))


FAULTS = {
    "no reduction": no_reduction,
    "last microbatch only": last_microbatch_only,
    "stale parameters": stale_parameters,
    "no replica sum": no_replica_sum,
    "own norm": own_norm,
}
