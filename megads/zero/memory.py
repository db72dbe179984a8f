"""How many bytes model states take on a rank, to the byte, before anything is allocated. Pure.

Counted are the flat buffers at their largest, shards, optimizer state, and what streaming through
the host needs: "parameters" are weights in the model's type (in fp32 also the master weights where
they are the same memory), "optimizer" is master weights and moments, "buffers" the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megads.zero.partition import BucketPlan

PAGE = 4096
"""Bytes: direct input and output wants offsets, sizes and memory at multiples of the block size."""
BUFFER_SETS = 3
"""Of a stream through the host: one being read, one being updated, one being written."""


@dataclass(frozen=True)
class Usage:
    """Bytes by kind in one place."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class StateMemory:
    """Bytes of model states on one rank: in the device's memory, the host's, and in a file.

    Without offload everything is on the device, which may be the CPU.
    """

    device: Usage
    host: Usage = Usage()
    file: int = 0


@dataclass(frozen=True)
class FileLayout:
    """Where a file holds `kinds` fp32 values of each element of shards of `numels` elements.

    The kinds of a shard lie one after the other, each at a page boundary. `budget`: bytes of host
    memory for streaming; at least a page of each kind is taken.
    """

    kinds: int
    numels: tuple[int, ...]
    budget: int

    @property
    def piece(self) -> int:
        """Elements of a shard that are streamed at once, the last ones maybe fewer."""
        per_kind = self.budget // (BUFFER_SETS * self.kinds) // PAGE * PAGE
        return min(max(per_kind, PAGE), in_pages(4 * max(self.numels, default=1))) // 4

    @property
    def buffer_bytes(self) -> int:
        """Host memory for streaming."""
        return BUFFER_SETS * self.kinds * 4 * self.piece

    @property
    def file_bytes(self) -> int:
        return sum(self.kinds * in_pages(4 * numel) for numel in self.numels)

    def offsets(self) -> list[int]:
        """First byte of each shard."""
        offsets, end = [], 0
        for numel in self.numels:
            offsets.append(end)
            end += self.kinds * in_pages(4 * numel)
        return offsets


def in_pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


Reads = Sequence[Mapping[str, Sequence[int]]]
"""Of each chunk, units in forward order with the numbers of the buckets whose parameters they
read."""


def predict_memory(
    plans: Sequence[BucketPlan],
    reads: Reads,
    *,
    shard_size: int,
    stage: int,
    offload: str,
    itemsize: int,
    moments: int,
    budget: int,
) -> StateMemory:
    """Bytes of the model states over buckets `plans` (see `ZeroOptimizer`).

    `itemsize`: bytes of a parameter in the model's type; `moments`: fp32 values that the update
    rule keeps per parameter; `budget`: for FileLayout. Trained is every parameter.
    """
    if shard_size == 1 and offload == "none":
        stage = 0
    whole = [plan.numel for plan in plans]
    shares = [plan.numel // shard_size for plan in plans]
    stays, moves, fp32 = stage < 3, stage >= 2 or offload != "none", itemsize == 4
    owned = 4 * sum(shares)
    ahead = units_ahead(offload, shard_size)
    parameters = itemsize * (sum(whole) if stays else peak_gathered(whole, reads, ahead))
    gradients = 4 * (sum(whole) if stage < 2 else peak_unreduced(plans, reads))
    shard = Usage(
        parameters=0 if stays else itemsize * sum(shares),
        gradients=owned if moves else 0,
        optimizer=moments * owned + (0 if fp32 and (not stays or offload == "none") else owned),
    )
    if offload == "none":
        device = Usage(parameters + shard.parameters, gradients + shard.gradients, shard.optimizer)
        return StateMemory(device)
    device = Usage(parameters, gradients)
    if offload == "cpu":
        return StateMemory(device, shard)
    file = FileLayout(1 + moments, tuple(shares), budget)
    return StateMemory(device, Usage(gradients=owned, buffers=file.buffer_bytes), file.file_bytes)


def units_ahead(offload: str, shard_size: int) -> int:
    """Beyond the unit that is computed, how many have their parameters on the way under stage 3.

    Two where there is a shard to be read from a file before all of them are gathered.
    """
    return 2 if offload == "nvme" and shard_size > 1 else 1


def peak_gathered(numels: Sequence[int], reads: Reads, ahead: int) -> int:
    """Most elements of parameters at once under stage 3: those of 1 + `ahead` units in a row."""
    peak = 0
    for units in reads:
        buckets = list(units.values())
        for at in range(len(buckets)):
            there = {number for read in buckets[at : at + 1 + ahead] for number in read}
            peak = max(peak, sum(numels[number] for number in there))
    return peak


def peak_unreduced(plans: Sequence[BucketPlan], reads: Reads) -> int:
    """Most elements of gradients at once that are being filled or reduced, under stage 2 and 3.

    Buckets are filled by the backward of the units that read their parameters. When a unit begins,
    what was being reduced is released, and the reduction of those that are full begins.
    """
    peak = 0
    for chunk, units in enumerate(reads):
        waiting = [number for number, plan in enumerate(plans) if plan.chunk == chunk]
        reducing: list[int] = []
        held: set[int] = set()
        for unit, read in reversed(list(units.items())):
            full = next((i for i, n in enumerate(waiting) if unit in plans[n].units), 0)
            if full:
                held.difference_update(reducing)
                reducing, waiting = waiting[:full], waiting[full:]
            held.update(read)
            peak = max(peak, sum(plans[number].numel for number in held))
    return peak
