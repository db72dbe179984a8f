"""The ledger of a run and its audit: digests by plain Python, and what tampering does."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.data.audit import Coverage, audit
from megads.data.ledger import LEDGER, DataLedger, Rewind, read_rewinds
from megads.data.order import DataOrder
from megads.data.plan import DataPlan, Mixture, PlannedSource
from megads.errors import DataError

A, B, C = (
    PlannedSource.make(name, f"content of {name}", size, 3)
    for name, size in (("a", 10), ("b", 16), ("c", 5))
)


def order_of(weights: tuple[float, ...], skips: tuple[tuple[int, int], ...] = ()) -> DataOrder:
    return DataOrder(DataPlan.begin([A, B], Mixture(weights, (None, None), skips)))


class Run:
    """Writes the ledger as training does."""

    def __init__(self, folder: Path, order: DataOrder) -> None:
        self.folder, self.order, self.step, self.samples = folder, order, 0, 0

    def go(self, *sizes: int) -> None:
        """One process of the run: a step of each of these sizes."""
        ledger = DataLedger(self.folder / LEDGER, writes=True)
        ledger.start(self.order, run="r", step=self.step, samples=self.samples, seq_length=5)
        for size in sizes:
            self.step, self.samples = self.step + 1, self.samples + size
            ledger.record(self.step, self.samples - size, size)
        ledger.sync()
        ledger.close()

    def change(
        self, sources: list[PlannedSource], weights: tuple[float, ...], skip: int = 0
    ) -> None:
        here = self.order.plan.position(self.samples)
        mixture = Mixture(weights, (None,) * len(sources), ((here, here + skip),))
        self.order = DataOrder(self.order.continued(sources, mixture, self.samples))

    def back_to(self, step: int, samples: int, order: DataOrder) -> None:
        self.step, self.samples, self.order = step, samples, order


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Ramp-up, a resume, rolled back steps, new weights, a third source, a skip, more epochs."""
    first = order_of((0.25, 0.75))
    run = Run(tmp_path, first)
    run.go(2, 2, 4, 4)
    run.back_to(2, 4, first)
    run.go(4, 4, 6)
    run.change([A, B], (0.5, 0.5))
    run.go(6, 6)
    run.change([A, B], (0.5, 0.5), skip=5)
    run.go(6)
    run.change([A, C], (2, 1))
    run.go(6, 6, 6, 6)
    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def rewrite(folder: Path, entries: list[dict[str, Any]]) -> None:
    (folder / LEDGER).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_a_run_with_everything_in_it_is_in_order(run: Run) -> None:
    report = audit(run.folder)
    assert report.problems == []
    assert (report.first_step, report.last_step, report.samples) == (1, 12, run.samples)
    assert (report.starts, report.rolled_back) == (5, 2)
    assert sum(source.read for source in report.sources) == run.samples
    assert sum(source.skipped for source in report.sources) == 5
    assert sum(source.share for source in report.sources) == pytest.approx(1)
    assert sum(source.target for source in report.sources) == pytest.approx(1)
    a = report.sources[0]
    assert (a.name, a.size, a.epochs) == ("a", 10, (a.read + a.skipped) / 10)


def test_digests_by_plain_python(run: Run) -> None:
    """Without anything of the ledger's: pairs of 8 bytes each through hashlib."""
    entry = lines(run.folder)[1]
    located = order_of((0.25, 0.75)).locate(np.arange(2))
    digest = hashlib.blake2b(digest_size=16)
    for number, sample in zip(located.source.tolist(), located.sample.tolist(), strict=True):
        source = (A, B)[number]
        name = f"{source.identity} {source.seed}".encode()
        digest.update(hashlib.blake2b(name, digest_size=8).digest())
        digest.update(sample.to_bytes(8, "little"))
    assert entry == {
        "kind": "step",
        "step": 1,
        "samples": 0,
        "count": 2,
        "digest": digest.hexdigest(),
        "given": [1, 1] if set(located.source) == {0, 1} else [0, 2],
    }


def spoil(key: str, value: Callable[[Any], Any]) -> Callable[[list[dict[str, Any]]], None]:
    def change(entries: list[dict[str, Any]]) -> None:
        entry = next(e for e in entries[9:] if e["kind"] == "step" and e["step"] == 6)
        entry[key] = value(entry[key])

    return change


def without_step_6(entries: list[dict[str, Any]]) -> None:
    entries[:] = [e for e in entries if e["kind"] == "start" or e["step"] != 6]


def step_6_twice(entries: list[dict[str, Any]]) -> None:
    at = next(n for n, e in enumerate(entries) if e["kind"] == "step" and e["step"] == 6)
    entries.insert(at, entries[at])


def in_the_plan(spoiled: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """Spoil the plan that steps from 6 on are recorded under."""

    def change(entries: list[dict[str, Any]]) -> None:
        starts = [e for e in entries if e["kind"] == "start"]
        spoiled(starts[2]["plan"])

    return change


TAMPERING: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "digest": spoil("digest", lambda d: d[:-1] + ("0" if d[-1] != "0" else "1")),
    "count": spoil("count", lambda n: n + 1),
    "samples before": spoil("samples", lambda n: n - 6),
    "counts after": spoil("given", lambda g: [g[0] + 1, g[1] - 1]),
    "a negative count": spoil("count", lambda n: -n),
    "no number": spoil("count", lambda n: "many"),
    "a step is missing": without_step_6,
    "a step is there twice": step_6_twice,
    "other parts": in_the_plan(lambda p: p["segments"][1].update(parts=[1, 2])),
    "samples read again": in_the_plan(lambda p: p["segments"][1].update(given=[0, 0])),
    "samples lost": in_the_plan(lambda p: p["segments"][1].update(given=[9, 9])),
    "another order": in_the_plan(lambda p: p["sources"][0].update(key=5)),
    "another source": in_the_plan(lambda p: p["sources"][0].update(identity="x")),
    "another size": in_the_plan(lambda p: p["sources"][0].update(samples=11)),
    "a skip": in_the_plan(lambda p: p.update(skips=[[20, 22]])),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_seen_and_its_step_named(run: Run, name: str) -> None:
    entries = lines(run.folder)
    TAMPERING[name](entries)
    rewrite(run.folder, entries)
    problems = audit(run.folder).problems
    named = ("after step 5", "step 6", "step 7")
    assert any(name in problem for problem in problems for name in named), problems
    assert not any(problem.startswith(f"step {n}:") for problem in problems for n in range(1, 6))


@pytest.mark.parametrize("given", [[0, 0], [9, 9]])
def test_a_run_that_really_forgot_is_seen(tmp_path: Path, given: list[int]) -> None:
    """Digests agree with the plan here; the plan itself repeats samples or leaves some out."""
    run = Run(tmp_path, order_of((0.5, 0.5)))
    run.go(4, 4)
    run.change([A, B], (0.25, 0.75))
    values = run.order.plan.to_dict()
    values["segments"][1]["given"] = given
    run.order = DataOrder(DataPlan.from_dict(values))
    run.go(4, 4)
    problems = audit(tmp_path).problems
    assert any("step 3: a has given 5 samples, by the plan" in problem for problem in problems)
    assert not any("digest" in problem for problem in problems)


def test_a_torn_last_line(run: Run) -> None:
    path = run.folder / LEDGER
    whole = path.read_bytes()
    for cut in (1, 30, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        report = audit(run.folder)
        assert (report.problems, report.last_step) == ([], 11)
    path.write_bytes(whole[:-30])
    run.back_to(11, run.samples - 6, run.order)
    run.go(6)
    assert (audit(run.folder).problems, audit(run.folder).last_step) == ([], 12)
    spoiled = whole.splitlines(keepends=True)
    spoiled[3] = b'{"kind": "st\n'
    path.write_bytes(b"".join(spoiled))
    assert any("line 4" in problem for problem in audit(run.folder).problems)


def test_steps_that_the_disk_lost(tmp_path: Path) -> None:
    """A run that goes on from a step that the ledger has not seen."""
    run = Run(tmp_path, order_of((0.5, 0.5)))
    run.go(4, 4)
    run.step, run.samples = 3, 12
    run.go(4)
    (problem, *_) = audit(tmp_path).problems
    assert problem == (
        "start after step 3 and 12 samples: the ledger has step 2 and 8 samples before it"
    )


def test_a_ledger_that_begins_in_the_middle(tmp_path: Path) -> None:
    """After `checkpoint.load` of another run, whose samples of this epoch count as read."""
    run = Run(tmp_path, order_of((0.5, 0.5)))
    run.step, run.samples = 5, 25
    run.go(4, 4, 8)
    report = audit(tmp_path)
    assert report.problems == []
    assert (report.first_step, report.last_step) == (6, 8)
    assert sum(source.read for source in report.sources) == 16
    assert sum(source.epochs * source.size for source in report.sources) == pytest.approx(41)


def test_only_one_rank_writes(tmp_path: Path) -> None:
    ledger = DataLedger(tmp_path / LEDGER, writes=False)
    ledger.start(order_of((1, 1)), run="r", step=0, samples=0, seq_length=5)
    ledger.record(1, 0, 4)
    ledger.rewind(REWIND)
    ledger.close()
    assert not (tmp_path / LEDGER).exists()


REWIND = Rewind("r", 3, 1, 8, 12, "nonfinite", math.nan, 2.5)


def rewound(folder: Path, skips: tuple[tuple[int, int], ...] = ((8, 12),)) -> Run:
    """Three steps, then back behind the first, to go on without the samples of the third."""
    run = Run(folder, order_of((0.25, 0.75)))
    run.go(4, 4, 4)
    ledger = DataLedger(folder / LEDGER, writes=True)
    ledger.rewind(REWIND)
    ledger.close()
    run.back_to(1, 4, order_of((0.25, 0.75), skips))
    run.go(4, 4, 4)
    return run


def test_a_rewind(tmp_path: Path) -> None:
    run = rewound(tmp_path)
    report = audit(tmp_path)
    assert (report.problems, report.rolled_back, len(report.rewinds)) == ([], 2, 1)
    assert sum(source.skipped for source in report.sources) == 4
    assert report.samples == run.samples == 16
    assert str(report.rewinds[0]) == (
        "from step 3 (nonfinite: loss nan, gradient norm 2.5) to step 1, without positions 8 to 11"
    )


def test_samples_that_were_to_be_left_out_are_seen(tmp_path: Path) -> None:
    rewound(tmp_path, skips=())
    (problem,) = audit(tmp_path).problems
    assert problem.startswith("step 3: reads what was to be left out by the rewind from step 3")
    entries = lines(tmp_path)
    for entry in entries:
        if entry["kind"] == "start":
            entry["run"] = "another"
    rewrite(tmp_path, entries)
    assert audit(tmp_path).problems == [], "it is about the run that made it alone"


def test_the_rewinds_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    assert read_rewinds(path, "r") == []
    rewound(tmp_path)
    (found,) = read_rewinds(path, "r")
    assert repr(found) == repr(REWIND)  # as NaN is not NaN
    assert read_rewinds(path, "other") == []
    whole = path.read_text()
    for old, new in (('"first":8,', ""), ('"loss":NaN,', '"loss":,')):
        path.write_text(whole.replace(old, new))
        with pytest.raises(DataError, match=r"data-ledger\.jsonl, line 5: "):
            read_rewinds(path, "r")
    assert any("line 5" in problem for problem in audit(tmp_path).problems)


def test_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data-ledger\.jsonl: no such file"):
        audit(tmp_path)
    (tmp_path / LEDGER).write_text("")
    with pytest.raises(DataError, match="no start"):
        audit(tmp_path)
    (tmp_path / LEDGER).write_text('{"kind": "start", "version": 99, "step": 0}\n')
    with pytest.raises(DataError, match="version 99"):
        audit(tmp_path)


def test_coverage_sees_repeats_within_and_between_calls() -> None:
    coverage = Coverage(10)
    assert coverage.mark(np.asarray([3, 9, 0])) is None
    assert coverage.mark(np.asarray([4, 9])) == 9
    coverage = Coverage(10)
    assert coverage.mark(np.asarray([3, 3])) == 3
    coverage = Coverage(3)
    assert coverage.mark(np.asarray([2, 0, 1, 1, 0, 2, 2])) is None, "three epochs begin here"
    assert coverage.mark(np.asarray([2])) == 2
