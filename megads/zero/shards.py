"""The shard of each bucket that a rank updates: where it lies, what it holds, how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megads.config.schema import OptimConfig
from megads.parallel.mesh import Mesh
from megads.parallel.sharding import Box, flat_range_boxes
from megads.zero.buckets import Bucket, Entry
from megads.zero.partition import ALIGNMENT
from megads.zero.states import MASTER, FileStates, MemoryStates, States

Initialize = Callable[[Entry], None]


@dataclass(frozen=True)
class Offload:
    """Where master weights, moments and reduced gradients live, and under stage 3 the parameters.

    "cpu": host memory. "nvme": a file in `path`, through `budget` bytes of host memory; gradients
    on the host.
    """

    kind: Literal["none", "cpu", "nvme"] = "none"
    path: Path = Path()
    budget: int = 0


NO_OFFLOAD = Offload()


class Segment(NamedTuple):
    """A run of a shard that shares one weight decay; positions count from the shard's start."""

    start: int
    stop: int
    decays: bool


@dataclass
class Shard:
    """The range [start, stop) of a bucket that this rank updates.

    `params`: the weights there, in the model's type; None when they are read from the state file.
    `is_master`: they are the fp32 master weights themselves. `grads`: the reduced gradients.
    """

    bucket: Bucket
    start: int
    stop: int
    params: Tensor | None
    is_master: bool
    grads: Tensor
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


class ShardMaker:
    """Makes the shards of a rank one after the other, under one stage and one offload."""

    def __init__(
        self, mesh: Mesh, stage: int, offload: Offload, config: OptimConfig, kinds: Sequence[str]
    ) -> None:
        self._mesh, self._stage, self._offload, self._config = mesh, stage, offload, config
        self._kinds = tuple(kinds)
        self._stays = stage < 3
        self.moves = stage >= 2 or offload.kind != "none"
        """Whether reduced gradients leave the bucket's own memory."""

    def make(self, buckets: Sequence[Bucket], initialize: Initialize) -> tuple[list[Shard], States]:
        """The shards of all buckets, with their initial weights, and their optimizer state."""
        states = self._states([b.plan.numel // self._mesh.shard.size for b in buckets])
        shards = [self._shard(n, bucket, states, initialize) for n, bucket in enumerate(buckets)]
        return shards, states

    def _states(self, numels: Sequence[int]) -> States:
        offload = self._offload
        if offload.kind == "nvme":
            pinned = self._mesh.device.type == "cuda"
            return FileStates(
                offload.path, self._kinds, numels, budget=offload.budget, pinned=pinned
            )
        moments = [kind for kind in self._kinds if kind != MASTER]
        return MemoryStates([{kind: self._zeros(n) for kind in moments} for n in numels])

    def _shard(self, number: int, bucket: Bucket, states: States, initialize: Initialize) -> Shard:
        start, stop = bucket.plan.part(self._mesh.shard.size, self._mesh.shard.index)
        bucket.params.acquire()
        for entry in bucket.entries:
            initialize(entry)
        own = bucket.params.tensor[start:stop]
        params, is_master = self._place_weights(number, own, states)
        if not self._stays:
            bucket.params.release()
        if self.moves:
            grads = self._zeros(stop - start)
        else:
            bucket.grads.acquire()
            grads = bucket.grads.tensor[start:stop]
        segments = tuple(_segments(bucket, start, stop, self._config))
        return Shard(bucket, start, stop, params, is_master, grads, segments)

    def _place_weights(
        self, number: int, own: Tensor, states: States
    ) -> tuple[Tensor | None, bool]:
        """Put the fp32 master of `own` into the states; where its weights are from now on."""
        if not isinstance(states, MemoryStates):
            states.write(number, MASTER, own)
            return (own, False) if self._stays else (None, True)
        is_fp32 = own.dtype == torch.float32
        if self._stays and is_fp32 and self._offload.kind == "none":
            states.shards[number][MASTER] = own
            return own, True
        master = states.shards[number][MASTER] = self._zeros(own.numel()).copy_(own)
        if self._stays:
            return own, False
        if is_fp32:
            return master, True
        return self._zeros(own.numel(), own.dtype).copy_(own), False

    def _zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory where a shard's state lives."""
        device = self._mesh.device
        if self._offload.kind == "none":
            return torch.zeros(numel, dtype=dtype, device=device)
        return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


def shard_boxes(shard: Shard, mesh: Mesh, *, only_owned: bool) -> Iterator[tuple[Entry, Box, int]]:
    """What a shard holds of which parameter: the entry, a box of it, and the box's start in it.

    `only_owned`: this rank's part of what the replicas of the shard have in common and, of
    replicated elements, the first copy; else everything in the shard.
    """
    start, stop = shard.start, shard.stop
    if only_owned:
        part = mesh.shard.index * mesh.replica.size + mesh.replica.index
        start, stop = shard.bucket.plan.part(mesh.dp.size, part)
    for entry, place in shard.bucket.placed():
        low, high = max(start, place.start), min(stop, place.stop)
        if low >= high:
            continue
        is_second_copy = entry.spec.tied and mesh.tied.index > 0
        for box in flat_range_boxes(
            entry.spec, mesh.tp.size, mesh.tp.index, low - place.start, high - place.start
        ):
            if not only_owned or (box.copy_index == 0 and not is_second_copy):
                yield entry, box, place.start + box.flat_start - shard.start


def _segments(bucket: Bucket, start: int, stop: int, config: OptimConfig) -> Iterator[Segment]:
    """Maximal runs of the shard [start, stop) with one weight decay, alignment gaps included.

    Positions count from `start`. Parameters that are not trained are left out.
    """
    current: Segment | None = None
    for entry, place in bucket.placed():
        low, high = max(start, place.start) - start, min(stop, place.stop) - start
        if low >= high or not entry.param.requires_grad:
            continue
        role = entry.spec.role
        decays = role == "matrix" or (role == "embedding" and config.decay_embeddings)
        is_next = current is not None and low - current.stop < ALIGNMENT
        if current is not None and is_next and current.decays == decays:
            current = current._replace(stop=high)
            continue
        if current is not None:
            yield current
        current = Segment(low, high, decays)
    if current is not None:
        yield current
