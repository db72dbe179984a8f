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

from megads.data.sampler import EpochOrder, Ids
from megads.errors import DataError

MAX_PERIOD = 1_000_000
"""Weights are honoured to one part in this many."""


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole parts of the smallest common total, at most MAX_PERIOD.

    Each float is taken for the simple fraction that it stands for (0.3 is 3/10). Where the exact
    total would exceed MAX_PERIOD, parts are rounded by largest remainder, no weight above zero
    to nothing. Raises DataError for a negative, infinite or NaN weight and when none is above zero.
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
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    parts = [max(int(share * MAX_PERIOD), 1) if share else 0 for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i] * MAX_PERIOD)
    for i in by_remainder[: max(0, MAX_PERIOD - sum(parts))]:
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
    """Positions of a stream to (source, how many samples that source gave before)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = np.asarray(integer_weights(weights), dtype=np.int64)
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


class BlendedOrder:
    """Positions to sample ids over several sources mixed by weight.

    Ids number the samples of the first source, then of the second, and so on. Each source goes
    through epochs of its own, so a small one with a large weight wraps around.

    Raises DataError for bad weights and for a source with a weight but without a sample.
    """

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int) -> None:
        if len(weights) != len(sizes):
            raise DataError(f"data.weights holds {len(weights)} weights for {len(sizes)} sources")
        self.blend = Blend(weights)
        for number, (part, size) in enumerate(zip(self.blend.parts, sizes, strict=True)):
            if part and size < 1:
                raise DataError(
                    f"source {number} has a weight but holds no sample: it is shorter than "
                    f"seq_length + 1 tokens"
                )
        self._offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        # Sources of equal size must not be read in step, hence a seed for each.
        self._orders = {
            source: EpochOrder(size, seed=(seed << 20) + source + 1)
            for source, size in enumerate(sizes)
            if self.blend.parts[source]
        }

    def ids(self, positions: Ids) -> Ids:
        """Sample ids at these positions, int64 of the same shape."""
        source, inside = self.blend.locate(positions)
        result = np.empty_like(inside)
        for number in np.unique(source):
            here = source == number
            order = self._orders[int(number)]
            result[here] = self._offsets[number] + order.ids(inside[here])
        return result
