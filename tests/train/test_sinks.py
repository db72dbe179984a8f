"""Lines on their way to files and trackers, and what a hung or broken tracker does: nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megads.train import metrics, sinks
from megads.train.metrics import Metrics
from megads.train.sinks import Background, JsonLines, Line, TensorBoard, numbers

LINE = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 1.0}
LINE |= {"step_time_s": 1.0, "mfu": None, "skipped": 0}


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path)
    lines.record({"step": 3})
    lines.close(0)
    assert steps_in(path) == [1, 3]


def test_lines_of_steps_that_are_made_again_move_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.made == 0
    for step in (2, 4, 4, 6, 8):
        lines.record({"step": step})
    lines.close(0)
    with path.open("a") as file:
        file.write("spoiled\n")
    lines = JsonLines(path)
    assert lines.made == 8
    lines.rewind(5, 8)
    assert lines.made == 4
    lines.record({"step": 6})
    lines.close(0)
    assert steps_in(path) == [2, 4, 4, 6]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert superseded == ['{"step": 6}', '{"step": 8}', "spoiled"]


def test_numbers_by_flat_names() -> None:
    line = {"step": 3, "mfu": None, "note": "text", "skipped": True, "times_s": [0.5, 0.25]}
    line |= {"phases_s": {"forward": 1.5, "all_reduce dp": 0.0}, "deep": {"a": [{"b": 7}]}}
    assert numbers(line) == {
        "step": 3,
        "skipped": 1,
        "times_s/0": 0.5,
        "times_s/1": 0.25,
        "phases_s/forward": 1.5,
        "phases_s/all_reduce dp": 0.0,
        "deep/a/0/b": 7,
    }


class Tracker:
    """Keeps what it is told; `blocks` is waited for with every line."""

    def __init__(self, blocks: threading.Event | None = None) -> None:
        self.seen: list[Any] = []
        self._blocks = blocks

    def rewind(self, step: int, made: int) -> None:
        self.seen.append(("rewind", step, made))

    def record(self, line: Line) -> None:
        if self._blocks is not None:
            self._blocks.wait()
        self.seen.append(line["step"])

    def close(self, status: int) -> None:
        self.seen.append(("close", status))


@pytest.fixture
def metrics_of(tmp_path: Path) -> Iterator[Callable[..., Metrics]]:
    """Makes metrics with trackers in the background; they are let go of at the end."""

    def make(**makers: Callable[[], Any]) -> Metrics:
        notes = metrics.queue.SimpleQueue[str]()
        trackers = [Background(name, maker, notes.put) for name, maker in makers.items()]
        return Metrics(tmp_path, trackers, notes)

    yield make


def run(made: Metrics, steps: int) -> float:
    """A run of so many steps; the longest that one of its calls took, in seconds."""
    longest = 0.0
    for call in (lambda: made.rewind(1), *[lambda: made.step(LINE, steps)] * steps):
        started = time.perf_counter()
        call()
        longest = max(longest, time.perf_counter() - started)
    return longest


def test_trackers_get_everything_in_order(metrics_of: Callable[..., Metrics]) -> None:
    one, two = Tracker(), Tracker()
    made = metrics_of(one=lambda: one, two=lambda: two)
    run(made, 3)
    made.evaluation(3, 1.0, {"a": 1.0, "b": 1.0})
    made.rewind(2)
    made.close(3)
    assert one.seen == [("rewind", 1, 0), 1, 1, 1, 3, ("rewind", 2, 3), ("close", 3)]
    assert two.seen == one.seen


def test_nothing_is_opened_without_a_step(metrics_of: Callable[..., Metrics]) -> None:
    opened: list[Tracker] = []

    def opening() -> Tracker:
        opened.append(Tracker())
        return opened[-1]

    made = metrics_of(one=opening)
    made.note("already finished")
    made.close(0)
    assert opened == []
    made = metrics_of(one=opening)
    run(made, 1)
    made.close(0)
    assert len(opened) == 1


@pytest.mark.parametrize("where", ["start", "line"])
def test_a_tracker_that_hangs_holds_nobody_up(
    metrics_of: Callable[..., Metrics],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    where: str,
) -> None:
    """It is told of once when lines are dropped, and left behind in the end; others are not."""
    monkeypatch.setattr(sinks, "CAPACITY", 5)
    monkeypatch.setattr(metrics, "CLOSE_S", 0.3)
    never = threading.Event()

    def hang() -> Tracker:
        if where == "start":
            never.wait()
        return Tracker(never)

    good = Tracker()
    made = metrics_of(slow=hang, good=lambda: good)
    for number in range(1, 14):
        assert run(made, 1) < 5.0
        deadline = time.monotonic() + 30
        while good.seen.count(1) < number and time.monotonic() < deadline:
            time.sleep(0.001)
    started = time.perf_counter()
    made.close(0)
    assert 0.25 < time.perf_counter() - started < 10.0
    never.set()
    out = capsys.readouterr().out
    assert out.count("slow is too slow: lines are left out") == 1
    assert out.count("slow does not come to an end and is left behind") == 1
    assert good.seen[-1] == ("close", 0) and "good" not in out
    assert len(steps_in(tmp_path / "metrics.jsonl")) == 13


def test_a_tracker_that_is_slow_for_a_while_says_how_much_it_missed(
    metrics_of: Callable[..., Metrics],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sinks, "CAPACITY", 5)
    later = threading.Event()
    slow = Tracker(later)
    made = metrics_of(slow=lambda: slow)
    run(made, 20)
    threading.Timer(0.1, later.set).start()
    made.close(0)
    assert slow.seen[-1] == ("close", 0)
    missed = 20 - slow.seen.count(1)
    assert 14 <= missed <= 16
    assert f"slow was too slow for {missed} lines" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["start", "line", "end"])
def test_a_tracker_that_fails_is_told_of_and_left_out(
    metrics_of: Callable[..., Metrics],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    where: str,
) -> None:
    class Broken(Tracker):
        def __init__(self) -> None:
            super().__init__()
            self.fail("start")

        def record(self, line: Line) -> None:
            self.fail("line")

        def close(self, status: int) -> None:
            self.fail("end")

        def fail(self, here: str) -> None:
            if where == here:
                raise SystemExit("no more disk")

    made = metrics_of(broken=Broken)
    run(made, 3)
    made.close(0)
    out = capsys.readouterr().out
    assert out.count("broken has failed") == 1 and "SystemExit: no more disk" in out
    assert len(steps_in(tmp_path / "metrics.jsonl")) == 3


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    """A run that crashed after step 4 and went on from 2; at 6 it went back by itself to 5."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    first = TensorBoard(folder, "train:\n  steps: 9\n")
    first.rewind(0, 0)
    for step in range(1, 5):
        first.record({"step": step, "loss": 1.0, "mfu": None, "phases_s": {"forward": 0.5}})
    first.close(1)
    second = TensorBoard(folder, "train:\n  steps: 9\n")
    second.rewind(2, 4)
    for step in range(3, 7):
        second.record({"step": step, "loss": 2.0})
    second.rewind(5, 6)
    second.record({"step": 6, "loss": 3.0})
    second.record({"step": 6, "val_loss": float("inf")})
    second.close(0)
    assert scalars(folder) == {
        "loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 3.0)],
        "phases_s/forward": [(1, 0.5), (2, 0.5)],
        "val_loss": [(6, float("inf"))],
    }
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    train:\n      steps: 9" in text
