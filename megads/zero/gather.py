"""ZeRO stage 3: whole parameters exist only while a unit computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.mesh import Mesh
from megads.zero.buckets import Bucket

Fetch = Callable[[Bucket, Tensor], Future[None] | None]
"""Fill a tensor with this rank's shard of a bucket's parameters, in the model's type; a Future if
the host has to wait for it."""


class ParamGatherer:
    """Gathers the buckets of the unit about to be computed, and of the next one ahead of time.

    At most the parameters of two neighbouring units are there at once. A unit stays until another
    is announced: the last one of a forward pass is still there when its backward begins.

    `needs[chunk][unit]`: the buckets that hold parameters of the unit, units in forward order.
    """

    def __init__(
        self, needs: Sequence[Mapping[str, Sequence[Bucket]]], mesh: Mesh, fetch: Fetch
    ) -> None:
        self._needs, self._mesh, self._fetch = needs, mesh, fetch
        self._order = [list(units) for units in needs]
        self._held: dict[int, tuple[Bucket, _Gathering]] = {}

    def before_unit(self, chunk: int, unit: str, *, forward: bool) -> None:
        """Have the parameters of `unit`, and begin to gather those of the unit after it."""
        order = self._order[chunk]
        after = order.index(unit) + (1 if forward else -1)
        now = self._needs[chunk][unit]
        soon = self._needs[chunk][order[after]] if 0 <= after < len(order) else []
        self._release_all_but([*now, *soon])
        for bucket in (*now, *soon):
            if id(bucket) not in self._held:
                self._held[id(bucket)] = bucket, _Gathering(bucket, self._mesh, self._fetch)
        for bucket in now:
            self._held[id(bucket)][1].complete()

    def release(self) -> None:
        """Drop everything: the parameters are about to change."""
        self._release_all_but([])

    def _release_all_but(self, kept: Sequence[Bucket]) -> None:
        keys = {id(bucket) for bucket in kept}
        for key in [key for key in self._held if key not in keys]:
            bucket, gathering = self._held.pop(key)
            gathering.complete()
            bucket.params.release()


class _Gathering:
    """One bucket on its way: first the own shard is fetched, then everybody's are gathered.

    The collective begins at once unless the host has to wait for the shard (in a file); then it
    begins when the bucket is needed, which is at the same point on all ranks.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, fetch: Fetch) -> None:
        self._bucket, self._mesh = bucket, mesh
        bucket.params.acquire()
        start, stop = bucket.plan.part(mesh.shard.size, mesh.shard.index)
        self._fetching = fetch(bucket, bucket.params.tensor[start:stop])
        self._gathering: Handle | None = None
        if self._fetching is None:
            self._gather()

    def _gather(self) -> None:
        flat = self._bucket.params.tensor
        self._gathering = collectives.all_gather_flat_async(flat, self._mesh.shard)

    def complete(self) -> None:
        if self._fetching is not None:
            self._fetching.result()
            self._fetching = None
            self._gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
