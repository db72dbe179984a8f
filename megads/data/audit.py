"""Holding a run to its ledger: was every sample read once an epoch, and none lost? Pure: no torch.

The samples of each step are computed again from the recorded plan and compared with the recorded
digest. Apart from that, each source's samples are marked in a map of its current epoch, a bit for
each, however many plans, restarts and batch sizes there were. Memory: that map, and one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megads.data.ledger import LEDGER, VERSION, Rewind, samples_digest
from megads.data.order import DataOrder, Located
from megads.data.plan import DataPlan, PlannedSource
from megads.data.sampler import Ids
from megads.errors import DataError

_CHUNK = 2**16
_MOST = 2**28
Key = tuple[str, int]


@dataclass(frozen=True)
class SourceTotals:
    """One source over the whole run: `target` and `share` are parts of all samples, 0 to 1."""

    name: str
    size: int
    read: int
    skipped: int
    epochs: float
    share: float
    target: float


@dataclass
class AuditReport:
    """What an audit found; `problems` name the step and are empty when all is well."""

    first_step: int = 0
    last_step: int = 0
    samples: int = 0
    starts: int = 0
    rolled_back: int = 0
    rewinds: list[Rewind] = field(default_factory=list)
    sources: list[SourceTotals] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Coverage:
    """Which samples of a source were given in its current epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.read, self.skipped, self.before = size, 0, 0, 0
        self._bits = np.zeros(-(-size // 8), dtype=np.uint8)
        self._marked = 0

    @property
    def given(self) -> int:
        """Samples given so far, those skipped and those of before the ledger included."""
        return self.read + self.skipped + self.before

    def mark(self, ids: Ids) -> int | None:
        """Mark samples in the order they are given; the first that its epoch had already, if any.

        A full epoch begins the next one.
        """
        repeated = None
        while len(ids):
            part, ids = np.split(ids, [self.size - self._marked])
            values, first = np.unique(part, return_index=True)
            known = self._bits[values >> 3] >> (values & 7).astype(np.uint8) & 1
            twice = np.concatenate([values[known == 1], np.delete(part, first)])
            repeated = int(twice[0]) if len(twice) and repeated is None else repeated
            np.bitwise_or.at(self._bits, part >> 3, (1 << (part & 7)).astype(np.uint8))
            self._marked += len(part)
            if self._marked == self.size:
                self._bits[:] = 0
                self._marked = 0
        return repeated


def audit(run_dir: Path) -> AuditReport:
    """Check the ledger of a run. Raises DataError when there is none or none of it is readable."""
    path = run_dir / LEDGER
    if not path.is_file():
        raise DataError(f"{path}: no such file; a run of megads-train writes it into its run.dir")
    return _Audit(path).report


class _Audit:
    """One pass over the ledger."""

    def __init__(self, path: Path) -> None:
        self.report = AuditReport()
        self.coverage: dict[Key, Coverage] = {}
        self.order: DataOrder | None = None
        self.position = 0
        self._run: str | None = None
        self._next_step: int | None = None
        live_until = _live_until(path)
        for number, entry in entries(path):
            try:
                self._take(entry, live_until)
            except (LookupError, TypeError, ValueError, OverflowError, DataError) as error:
                where = f"step {entry['step']}" if "step" in entry else "damaged"
                self._problem(f"line {number}, {where}: {type(error).__name__} {error}")
        if self.order is None:
            raise DataError(f"{path}: holds no start of a run")
        self._close(self.order)

    def _take(self, entry: dict[str, Any], live_until: list[int]) -> None:
        kind, step = entry.get("kind"), entry.get("step")
        if kind == "start":
            self.report.starts += 1
            if live_until[self.report.starts - 1] > int(entry["step"]):
                self._start(entry)
        elif kind == "rewind":
            self.report.rewinds.append(Rewind.from_entry(entry))
        elif kind != "step" or not isinstance(step, int) or not self.report.starts:
            raise DataError("neither a start of a run nor a step after one")
        elif step > live_until[self.report.starts - 1]:
            self.report.rolled_back += 1
        elif self.order is not None:
            self._step(entry, self.order)

    def _problem(self, text: str) -> None:
        self.report.problems.append(text)

    def _start(self, entry: dict[str, Any]) -> None:
        report, step, samples = self.report, int(entry["step"]), int(entry["samples"])
        plan = DataPlan.from_dict(entry["plan"])
        self.order, self._run = DataOrder(plan), entry.get("run")
        begins = self._next_step is None
        if begins:
            self._next_step, report.first_step = step + 1, step + 1
            report.last_step, report.samples = step, samples
            self.position = plan.position(samples)
        if (step, samples) != (report.last_step, report.samples):
            self._problem(
                f"start after step {step} and {samples} samples: the ledger has step "
                f"{report.last_step} and {report.samples} samples before it"
            )
        given = self.order.counts(self.position)
        for number, source in enumerate(plan.sources):
            covered = self.coverage.get(_key(source))
            if covered is None:
                covered = self.coverage[_key(source)] = Coverage(source.samples)
                if begins:
                    self._read_before(number, int(given[number]), covered)
            if covered.size != source.samples:
                self._problem(
                    f"start after step {step}: {source.name} has {source.samples} samples, before "
                    f"it had {covered.size}"
                )

    def _read_before(self, number: int, given: int, covered: Coverage) -> None:
        """Mark what another run, whose checkpoint this one began with, has read of this epoch."""
        assert self.order is not None
        begin = given - given % max(1, covered.size)
        covered.before = given
        for at in range(begin, given, _CHUNK):
            inside = np.arange(at, min(given, at + _CHUNK), dtype=np.int64)
            covered.mark(self.order.samples(number, inside))

    def _step(self, entry: dict[str, Any], order: DataOrder) -> None:
        step, samples, count = int(entry["step"]), int(entry["samples"]), int(entry["count"])
        report = self.report
        if not 0 < count <= _MOST:
            raise DataError(f"{count} samples in one step")
        if step != self._next_step:
            self._problem(f"step {step}: follows step {report.last_step} in the ledger")
        if samples != report.samples:
            self._problem(
                f"step {step}: begins after {samples} samples, {report.samples} were consumed"
            )
        positions = order.positions(np.arange(samples, samples + count, dtype=np.int64))
        for rewind in report.rewinds:
            if rewind.run == self._run and np.any(_inside(positions, rewind)):
                self._problem(f"step {step}: reads what was to be left out by the rewind {rewind}")
        located = order.locate(positions)
        found = samples_digest(order.plan, located)
        if found != entry["digest"]:
            self._problem(
                f"step {step}: the plan gives samples of digest {found}, recorded {entry['digest']}"
            )
        after = int(positions[-1]) + 1
        ends = np.concatenate(([self.position], positions[:-1] + 1))
        for gap in np.flatnonzero(ends < positions):
            self._mark_skipped(step, order, int(ends[gap]), int(positions[gap]))
        for number, ids in _by_source(located):
            covered = self.coverage[_key(order.plan.sources[number])]
            covered.read += len(ids)
            self._mark(step, order.plan.sources[number], covered, ids)
        self._compare_counts(step, order, after, entry["given"])
        self.position = after
        report.last_step, report.samples, self._next_step = step, samples + count, step + 1

    def _mark_skipped(self, step: int, order: DataOrder, first: int, after: int) -> None:
        for at in range(first, after, _CHUNK):
            positions = np.arange(at, min(after, at + _CHUNK), dtype=np.int64)
            for number, ids in _by_source(order.locate(positions)):
                covered = self.coverage[_key(order.plan.sources[number])]
                covered.skipped += len(ids)
                self._mark(step, order.plan.sources[number], covered, ids)

    def _mark(self, step: int, source: PlannedSource, covered: Coverage, ids: Ids) -> None:
        repeated = covered.mark(ids)
        if repeated is not None:
            self._problem(f"step {step}: {source.name} gives sample {repeated} again in its epoch")

    def _compare_counts(self, step: int, order: DataOrder, after: int, recorded: list[int]) -> None:
        planned = order.counts(after).tolist()
        marked = [self.coverage[_key(source)].given for source in order.plan.sources]
        for number, source in enumerate(order.plan.sources):
            if marked[number] != planned[number]:
                self._problem(
                    f"step {step}: {source.name} has given {marked[number]} samples, by the plan "
                    f"{planned[number]}: some were lost or repeated"
                )
        if recorded != planned:
            self._problem(f"step {step}: recorded counts {recorded}, by the plan {planned}")
        if order.deviation(after) >= 1:
            self._problem(f"step {step}: the mix is a whole sample or more from its target")

    def _close(self, order: DataOrder) -> None:
        """Sum up by source, in the last plan's order."""
        total = max(1, self.position)
        targets = order.targets(self.position)
        read = sum(covered.read for covered in self.coverage.values())
        for source, target in zip(order.plan.sources, targets, strict=True):
            covered = self.coverage[_key(source)]
            self.report.sources.append(
                SourceTotals(
                    source.name,
                    source.samples,
                    covered.read,
                    covered.skipped,
                    covered.given / max(1, source.samples),
                    covered.read / max(1, read),
                    target / total,
                )
            )


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a ledger with their numbers; a line that is no object is an empty one.

    A last line without its end is left out: the run was killed while it wrote.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            yield number, entry if isinstance(entry, dict) else {}


def _live_until(path: Path) -> list[int]:
    """For each start in the ledger, the last step after it that no later start went back behind."""
    starts = []
    for number, entry in entries(path):
        if entry.get("kind") == "start":
            if entry.get("version") != VERSION:
                raise DataError(
                    f"{path}: line {number} is of version {entry.get('version')}, only {VERSION} "
                    f"is known"
                )
            if not isinstance(entry.get("step"), int):
                raise DataError(f"{path}: line {number} is a start without a step")
            starts.append(entry["step"])
    live, least = [], 2**63
    for step in reversed(starts):
        live.append(least)
        least = min(least, step)
    return live[::-1]


def _by_source(located: Located) -> Iterator[tuple[int, Ids]]:
    for number in np.unique(located.source):
        yield int(number), located.sample[located.source == number]


def _inside(positions: Ids, rewind: Rewind) -> NDArray[np.bool_]:
    return (positions >= rewind.first) & (positions < rewind.after)


def _key(source: PlannedSource) -> Key:
    return source.identity, source.seed
