"""How parameters are packed into flat buckets and which part of a bucket a rank owns. Pure.

Buckets are filled in backward order, so that the first one is complete while most of the backward
pass is still to come and its reduction overlaps with it. Every bucket is padded to a multiple of
the data-parallel size; shard r of S is the r-th of S equal parts (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Parameters start at multiples of this many elements: 128 bytes in bf16, what GPU GEMMs want."""


@dataclass(frozen=True)
class Item:
    """A parameter to be packed: the model chunk and the unit (block, embedding, head) it is in.

    `tied`: it lies on another stage too.
    """

    chunk: int
    unit: str
    numel: int
    tied: bool = False


@dataclass(frozen=True)
class Placement:
    """Parameter `index` (in the order given) occupies [start, start + numel) of its bucket."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its model chunk, the units it holds parts of, its content, its padded size."""

    chunk: int
    units: tuple[str, ...]
    tied: bool
    placements: tuple[Placement, ...]
    numel: int

    def part(self, parts: int, index: int) -> tuple[int, int]:
        """Range [start, stop) of equal part `index` of `parts`."""
        share = self.numel // parts
        return index * share, (index + 1) * share


def plan_buckets(items: Sequence[Item], *, dp: int, bucket_numel: int) -> list[BucketPlan]:
    """Pack parameters, given in backward order, into buckets of about `bucket_numel` elements.

    A bucket holds whole units of one chunk, or a part of one unit that alone is larger, so that
    ZeRO stage 3 can fetch and drop unit by unit. A parameter larger than a bucket gets one of its
    own, and so does each tied weight, which then lies alike on both stages that hold it.
    """
    sizes: dict[tuple[int, str], int] = {}
    for item in items:
        if not item.tied:
            key = (item.chunk, item.unit)
            sizes[key] = sizes.get(key, 0) + _align(item.numel)
    plans: list[BucketPlan] = []
    held: list[Placement] = []
    units: list[str] = []
    chunk, is_part = 0, False

    def close(*, tied: bool = False) -> None:
        nonlocal held, units, is_part
        if held:
            numel = _align(held[-1].stop, ALIGNMENT * dp)
            plans.append(BucketPlan(chunk, tuple(units), tied, tuple(held), numel))
        held, units, is_part = [], [], False

    for index, item in enumerate(items):
        size = sizes.get((item.chunk, item.unit), 0)
        filled = _align(held[-1].stop) if held else 0
        is_new_unit = item.unit not in units
        too_large = filled + item.numel > bucket_numel
        if is_new_unit:
            too_large = is_part or filled + size > bucket_numel
        if item.tied or item.chunk != chunk or too_large:
            close()
            filled = 0
        chunk, is_part = item.chunk, is_part or size > bucket_numel
        held.append(Placement(index, filled, item.numel))
        if item.unit not in units:
            units.append(item.unit)
        if item.tied:
            close(tied=True)
    close()
    return plans


def _align(numel: int, unit: int = ALIGNMENT) -> int:
    return -(-numel // unit) * unit
