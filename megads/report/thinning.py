"""Fewer points for a curve, with every spike that the eye would see. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence


def thin(values: Sequence[float], limit: int) -> list[int]:
    """Indices, in order, of at most `limit` finite values that look like all of them.

    Beside the first and the last, the smallest and the largest of equal stretches are kept, so no
    extreme is lost however narrow it is. `limit` is at least 4.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = (limit - 2) // 2
    inner = count - 2
    kept = [0]
    for index in range(stretches):
        stretch = range(1 + inner * index // stretches, 1 + inner * (index + 1) // stretches)
        kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [*kept, count - 1]
