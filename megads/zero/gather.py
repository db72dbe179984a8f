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
    """Gathers the buckets of the unit about to be computed, and of the next ones ahead of time.

    At most the parameters of `ahead` units and of the one before them are there at once. A unit
    stays until another is announced: the last one of a forward pass is still there when its
    backward begins.

    `needs[chunk][unit]`: the buckets that hold parameters of the unit, units in forward order.
    `ahead`: 1, or 2 where the host has to wait for a shard: it is fetched while a unit is computed,
    and gathered while the next one is.
    """

    def __init__(
        self, needs: Sequence[Mapping[str, Sequence[Bucket]]], mesh: Mesh, fetch: Fetch, ahead: int
    ) -> None:
        self._needs, self._mesh, self._fetch, self._ahead = needs, mesh, fetch, ahead
        self._order = [list(units) for units in needs]
        self._held: dict[int, tuple[Bucket, _Gathering]] = {}

    def before_unit(self, chunk: int, unit: str, *, forward: bool) -> None:
        """Have the parameters of `unit`, and those of the units after it on their way."""
        now, *later = self._coming(chunk, unit, forward=forward)
        self._release_all_but([*now, *(bucket for buckets in later for bucket in buckets)])
        for buckets in (now, *later):
            for bucket in buckets:
                if id(bucket) not in self._held:
                    self._held[id(bucket)] = bucket, _Gathering(bucket, self._mesh, self._fetch)
        # To begin waits for the shard: where nothing is gathered, until it is needed.
        begun = (now, *later[:1]) if self._mesh.shard.size > 1 else ()
        for buckets in begun:
            for bucket in buckets:
                self._held[id(bucket)][1].begin()
        for bucket in now:
            self._held[id(bucket)][1].complete()

    def _coming(self, chunk: int, unit: str, *, forward: bool) -> list[Sequence[Bucket]]:
        """What `unit` needs, and what each of the next units does."""
        order = self._order[chunk] if forward else self._order[chunk][::-1]
        at = order.index(unit)
        return [self._needs[chunk][name] for name in order[at : at + 1 + self._ahead]]

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

    The collective begins when it is told to, which is at the same point on all ranks.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, fetch: Fetch) -> None:
        self._bucket, self._mesh = bucket, mesh
        bucket.params.acquire()
        start, stop = bucket.plan.part(mesh.shard.size, mesh.shard.index)
        self._fetching = fetch(bucket, bucket.params.tensor[start:stop])
        self._gathering: Handle | None = None

    def begin(self) -> None:
        """Begin to gather, as soon as the own shard is there."""
        if self._gathering is None:
            if self._fetching is not None:
                self._fetching.result()
            flat = self._bucket.params.tensor
            self._gathering = collectives.all_gather_flat_async(flat, self._mesh.shard)

    def complete(self) -> None:
        """Wait until nothing is written to the bucket any more."""
        if self._gathering is not None:
            self._gathering.wait()
        elif self._fetching is not None:
            self._fetching.result()
