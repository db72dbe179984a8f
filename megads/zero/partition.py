"""How parameters are packed into flat buckets and which part of a bucket a rank owns. Pure.

Buckets are filled in backward order, so that the first one is complete while most of the backward
pass is still to come and its reduction overlaps with it. Every bucket is padded to a multiple of
the data-parallel size; ZeRO rank r owns the r-th equal chunk (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BucketKind = Literal["plain", "tp_partial", "kv_copies", "tied"]
"""What must happen to a bucket's gradients before they are summed over data-parallel ranks:
nothing; a sum over tp ranks; a sum of the rows of replicated KV heads over the ranks that hold
them; a sum over the two stages that share the embedding."""

ALIGNMENT = 64
"""Parameters start at multiples of this many elements: 128 bytes in bf16, what GPU GEMMs want."""


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
    """One bucket: its model chunk, its kind, what it holds, its padded size."""

    chunk: int
    kind: BucketKind
    placements: tuple[Placement, ...]
    numel: int

    def owned(self, dp: int, index: int) -> tuple[int, int]:
        """Range [start, stop) of data-parallel rank `index`."""
        share = self.numel // dp
        return index * share, (index + 1) * share


def plan_buckets(
    chunks: Sequence[int],
    kinds: Sequence[BucketKind],
    numels: Sequence[int],
    *,
    dp: int,
    bucket_numel: int,
) -> list[BucketPlan]:
    """Pack parameters, given in backward order, into buckets of about `bucket_numel` elements.

    A bucket holds parameters of one chunk and one kind; a larger parameter gets a bucket of its
    own, and so does each tied weight, which then lies alike on both stages that hold it.
    """
    plans: list[BucketPlan] = []
    open_buckets: dict[tuple[int, BucketKind], list[Placement]] = {}

    def close(key: tuple[int, BucketKind]) -> None:
        placements = open_buckets.pop(key, [])
        if placements:
            numel = _align(placements[-1].stop, ALIGNMENT * dp)
            plans.append(BucketPlan(key[0], key[1], tuple(placements), numel))

    for index, (chunk, kind, numel) in enumerate(zip(chunks, kinds, numels, strict=True)):
        key = (chunk, kind)
        held = open_buckets.get(key, [])
        start = _align(held[-1].stop) if held else 0
        if held and (kind == "tied" or start + numel > bucket_numel):
            close(key)
            start = 0
        open_buckets.setdefault(key, []).append(Placement(index, start, numel))
    for key in list(open_buckets):
        close(key)
    return plans


def _align(numel: int, unit: int = ALIGNMENT) -> int:
    return -(-numel // unit) * unit
