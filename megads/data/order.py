"""Walking a data plan: from samples consumed to sources and sample ids. Pure: no torch.

Sample ids are numbers within a source. A source goes through its samples epoch by epoch in a
permutation of each epoch (`samples_of`), whatever the segments and skips do around it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megads.data.blend import Blend
from megads.data.plan import DataPlan, Mixture, PlannedSource, Segment
from megads.data.sampler import Ids, samples_of
from megads.errors import DataError


@dataclass(frozen=True)
class Located:
    """The samples at some positions, int64 of one shape: source, samples it gave before, id."""

    source: Ids
    inside: Ids
    sample: Ids


@dataclass(frozen=True)
class Stretch:
    """Positions `[start, stop)` in which the sources' shares stay as they are; stop None: on."""

    start: int
    stop: int | None
    blend: Blend
    given: Ids

    def counts(self, position: int) -> Ids:
        """Samples each source has given before `position`."""
        return self.given + self.blend.counts(position - self.start)


class DataOrder:
    """The order of a plan. Any position is looked up at once; nothing is remembered but tables.

    Threads may share one. Positions beyond what the plan's limits allow raise DataError.
    """

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        # A source without samples has no part in any segment; 1 spares a division by 0.
        self._sizes = [max(1, source.samples) for source in plan.sources]
        self._keys = [source.key for source in plan.sources]
        self._stretches: list[Stretch] = []
        self._blends: dict[tuple[int, ...], Blend] = {}
        self._lock = threading.Lock()
        lengths = np.asarray([after - first for first, after in plan.skips], dtype=np.int64)
        self._skipped = np.concatenate(([0], np.cumsum(lengths)))
        firsts = np.asarray([first for first, _ in plan.skips], dtype=np.int64)
        self._skip_at = firsts - self._skipped[:-1]

    def positions(self, consumed: Ids) -> Ids:
        """Position of the sample that is read after each of these numbers of consumed samples."""
        consumed = np.asarray(consumed, dtype=np.int64)
        return consumed + self._skipped[np.searchsorted(self._skip_at, consumed, side="right")]

    def locate(self, positions: Ids) -> Located:
        """What is read at these positions."""
        positions = np.asarray(positions, dtype=np.int64)
        source, inside = np.empty_like(positions), np.empty_like(positions)
        stretches = self._until(int(positions.max())) if positions.size else []
        starts = [stretch.start for stretch in stretches]
        where = np.searchsorted(starts, positions, side="right") - 1
        for number in np.unique(where):
            here, stretch = where == number, stretches[number]
            source[here], before = stretch.blend.locate(positions[here] - stretch.start)
            inside[here] = stretch.given[source[here]] + before
        return Located(source, inside, samples_of(source, inside, self._sizes, self._keys))

    def samples(self, source: int, inside: Ids) -> Ids:
        """Ids of the samples that a source gives after it gave `inside` others."""
        return samples_of(np.full_like(inside, source), inside, self._sizes, self._keys)

    def counts(self, position: int) -> Ids:
        """Samples each source has given, or been skipped, before `position`: `[sources]`."""
        if position == 0:
            return np.zeros(len(self.plan.sources), dtype=np.int64)
        return self._at(position - 1).counts(position)

    def deviation(self, position: int) -> float:
        """How far any source's count is from its share at `position`, since the shares changed."""
        if position == 0:
            return 0.0
        stretch = self._at(position - 1)
        period, parts = stretch.blend.period, stretch.blend.parts
        given = stretch.counts(position) - stretch.given
        # Whole numbers until the end, as counts can be large and the difference matters.
        return float(np.abs(given * period - parts * (position - stretch.start)).max()) / period

    def targets(self, position: int) -> list[float]:
        """What the shares alone would have each source give before `position`: `[sources]`."""
        total = np.zeros(len(self.plan.sources))
        for stretch in self._until(max(0, position - 1)):
            stop = position if stretch.stop is None else min(position, stretch.stop)
            total += stretch.blend.parts / stretch.blend.period * max(0, stop - stretch.start)
        return [float(value) for value in total]

    def continued(
        self, sources: Sequence[PlannedSource], mixture: Mixture, consumed: int
    ) -> DataPlan:
        """The plan with these sources in this mixture from `consumed` on; see DataPlan."""
        given = self.counts(self.plan.position(consumed)).tolist()
        return self.plan.continued(sources, mixture, consumed=consumed, given=given)

    def _at(self, position: int) -> Stretch:
        return next(s for s in reversed(self._until(position)) if s.start <= position)

    def _until(self, position: int) -> list[Stretch]:
        """Stretches from the first on, at least as far as `position`."""
        with self._lock:
            while not self._stretches or self._ends_by(position):
                self._stretches.append(self._next())
            return list(self._stretches)

    def _ends_by(self, position: int) -> bool:
        stop = self._stretches[-1].stop
        return stop is not None and stop <= position

    def _next(self) -> Stretch:
        segments, start = self.plan.segments, 0
        given = np.asarray(segments[0].given, dtype=np.int64)
        if self._stretches:
            start = self._stretches[-1].stop or 0
            given = self._stretches[-1].counts(start)
        number = max(n for n, segment in enumerate(segments) if segment.start <= start)
        segment = segments[number]
        if segment.start == start:
            given = np.asarray(segment.given, dtype=np.int64)
        following = segments[number + 1].start if number + 1 < len(segments) else None
        return self._stretch(segment, start, following, given)

    def _stretch(self, segment: Segment, start: int, following: int | None, given: Ids) -> Stretch:
        limits = {n: limit for n, limit in enumerate(segment.limits) if limit is not None}
        parts = [
            part if given[n] < limits.get(n, math.inf) else 0
            for n, part in enumerate(segment.parts)
        ]
        if not any(parts):
            raise DataError(
                f"data.epochs and data.limits allow {start} samples, the run asks for more; raise "
                f"them or lower train.steps"
            )
        blend = self._blend(parts)
        stops = [] if following is None else [following]
        stops += [
            start + blend.position_after(n, limit - int(given[n]))
            for n, limit in limits.items()
            if parts[n]
        ]
        return Stretch(start, min(stops, default=None), blend, given)

    def _blend(self, parts: list[int]) -> Blend:
        key = tuple(parts)
        if key not in self._blends:
            self._blends[key] = Blend(parts)
        return self._blends[key]
