"""Whether boxes fill a tensor exactly. Pure.

A box is (offset, shape), half-open. Thousands of boxes per tensor are normal (tensor-parallel
ranks times ZeRO shards), so comparing all pairs is not an option.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Extent = tuple[int, ...]
BoxLike = tuple[Extent, Extent]


def intersect(a: BoxLike, b: BoxLike) -> BoxLike | None:
    """The box two boxes share, or None."""
    offset = tuple(map(max, a[0], b[0]))
    stop = tuple(min(o1 + s1, o2 + s2) for o1, s1, o2, s2 in zip(*a, *b, strict=True))
    if any(high <= low for low, high in zip(offset, stop, strict=True)):
        return None
    return offset, tuple(high - low for low, high in zip(offset, stop, strict=True))


def tiling_problem(shape: Extent, boxes: Sequence[BoxLike]) -> str | None:
    """What keeps `boxes` from covering `shape` once everywhere, or None when nothing does."""
    for offset, extent in boxes:
        if len(offset) != len(shape) or len(extent) != len(shape):
            return f"piece at {list(offset)} of shape {list(extent)} has not {len(shape)} dims"
        for low, length, size in zip(offset, extent, shape, strict=True):
            if low < 0 or length < 1 or low + length > size:
                return (
                    f"piece at {list(offset)} of shape {list(extent)} is not inside {list(shape)}"
                )
    overlap = _find_overlap(boxes)
    if overlap:
        (first, _), (second, extent) = overlap
        return f"piece at {list(second)} of shape {list(extent)} overlaps the one at {list(first)}"
    covered = sum(math.prod(extent) for _, extent in boxes)
    if covered != math.prod(shape):
        return f"pieces cover {covered} of the {math.prod(shape)} elements of {list(shape)}"
    return None


def _find_overlap(boxes: Sequence[BoxLike]) -> tuple[BoxLike, BoxLike] | None:
    """Two boxes with an element in common, or None.

    Sweeps along the dim in which the boxes start at the most different places, comparing each box
    only with those that the sweep has entered and not left.
    """
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0][0]))
    if not dims:
        return boxes[0], boxes[1]
    along = max(dims, key=lambda dim: len({offset[dim] for offset, _ in boxes}))
    active: list[tuple[int, int]] = []  # (where it ends, index)
    for index in sorted(range(len(boxes)), key=lambda i: boxes[i][0][along]):
        offset, extent = boxes[index]
        while active and active[0][0] <= offset[along]:
            heapq.heappop(active)
        for _, other in active:
            if intersect(boxes[other], boxes[index]):
                return boxes[other], boxes[index]
        heapq.heappush(active, (offset[along] + extent[along], index))
    return None
