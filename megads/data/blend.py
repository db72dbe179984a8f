"""Mixing several sources by weight, exactly.

After any number n of samples, each source has given its weight times n to within one sample. The
sequence repeats with the common denominator of the weights, so one period is kept as a table and
any position is looked up at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megads.data.sampler import Ids
from megads.errors import DataError

MAX_PERIOD = 1_000_000
"""Weights are honoured to one part in this many."""


def integer_weights(weights: Sequence[float], most: int = MAX_PERIOD) -> tuple[int, ...]:
    """Weights as whole parts of the smallest common total, at most `most`.

    Each float is taken for the simple fraction that it stands for (0.3 is 3/10). Where the exact
    total would exceed `most`, parts are rounded by largest remainder, no weight above zero to
    nothing. Raises DataError for a negative, infinite or NaN weight and when none is above zero.
    """
    for number, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise DataError(f"data.weights[{number}]={weight}: must be a number of at least 0")
    if not any(weight > 0 for weight in weights):
        raise DataError(f"data.weights={list(weights)}: at least one must be above 0")
    exact = [_simplest(weight) for weight in weights]
    total = sum(exact, Fraction(0))
    shares = [fraction / total for fraction in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= most:
        return tuple(int(share * period) for share in shares)
    parts = [max(int(share * most), 1) if share else 0 for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * most)
    for i in by_remainder[: max(0, most - sum(parts))]:
        parts[i] += 1
    return tuple(parts)


def _simplest(weight: float) -> Fraction:
    exact = Fraction(weight)
    simple = exact.limit_denominator(MAX_PERIOD)
    # A few units in the last place: what arithmetic such as 35 * 0.01 leaves behind.
    return simple if abs(simple - exact) <= exact * 4 * Fraction(2) ** -52 else exact


def spread(parts: Sequence[int]) -> NDArray[np.int32]:
    """Source at each position of one period of `sum(parts)`.

    Unit j of a source with a of Q parts may not come before position floor(j Q / a) nor after
    ceil((j + 1) Q / a) - 1; among those due, the earliest deadline goes first. These windows always
    have a solution and then this rule finds one (Baruah et al. 1996, Steiner and Yeomans 1993), and
    they keep every source's count strictly within one of its share at every prefix.
    """
    total = sum(parts)
    source = np.repeat(np.arange(len(parts)), parts)
    share = np.repeat(np.asarray(parts, dtype=np.int64), parts)
    unit = np.concatenate([np.arange(part, dtype=np.int64) for part in parts])
    release, deadline = unit * total // share, -(-(unit + 1) * total // share)
    by_release = np.argsort(release, kind="stable")
    # Plain integers, deadline before source, make the heap below several times faster than tuples.
    urgency = (deadline * len(parts) + source)[by_release].tolist()
    available = np.searchsorted(release[by_release], np.arange(total), side="right").tolist()
    order = np.empty(total, dtype=np.int64)
    due: list[int] = []
    taken = 0
    for position, until in enumerate(available):
        while taken < until:
            heapq.heappush(due, urgency[taken])
            taken += 1
        order[position] = heapq.heappop(due)
    return (order % len(parts)).astype(np.int32)


class Blend:
    """Positions of a stream to (source, how many samples that source gave before).

    `parts`: each source's share as whole parts of their sum, one of them above 0.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self.parts = np.asarray(parts, dtype=np.int64) // math.gcd(*parts)
        """Samples of each source in one period."""
        self.period = int(self.parts.sum())
        self._source = spread(self.parts.tolist())
        self._before = np.empty(self.period, dtype=np.int32)
        for source in np.flatnonzero(self.parts):
            here = self._source == source
            self._before[here] = np.arange(self.parts[source])

    def locate(self, positions: Ids) -> tuple[Ids, Ids]:
        """Source index and position within that source's own stream, int64 each."""
        cycle, inside = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        source = self._source[inside].astype(np.int64)
        return source, cycle * self.parts[source] + self._before[inside]

    def counts(self, length: int) -> Ids:
        """Samples each source gives in the first `length` positions, int64 `[sources]`."""
        cycle, inside = divmod(length, self.period)
        rest = np.bincount(self._source[:inside], minlength=len(self.parts))
        return cycle * self.parts + rest

    def position_after(self, source: int, count: int) -> int:
        """Positions it takes until a source with a part above 0 has given `count` >= 1 samples."""
        cycle, rest = divmod(count - 1, int(self.parts[source]))
        return cycle * self.period + int(np.flatnonzero(self._source == source)[rest]) + 1
