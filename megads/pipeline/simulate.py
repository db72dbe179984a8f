"""Prove a pipeline schedule and measure it, without running it. Pure: no torch.

`simulate` plays all stages' actions with rendezvous messages: nothing is buffered, a message is
delivered when both its send and its receive are posted. A stage that has sent stands still while
more than `send_window` messages of that link are undelivered; with a window of 0 it stands still
until its message is taken. A larger window only removes reasons to wait, so what is free of
deadlock with one window is so with every larger one. Times are those of instant transfers and an
unlimited window: a result is available once it is made and its receive is posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from megads.errors import MegadsError
from megads.pipeline.schedule import Action, Schedule, Size


class ScheduleError(MegadsError):
    """A schedule is incomplete, computes before its data is there, or deadlocks."""


class Span(NamedTuple):
    """One computation of a stage and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a proven schedule costs.

    `spans`: (action, start, end) of each stage's computations. `peak_in_flight`: for each stage,
    the most (chunk, microbatch) pairs whose forward had run and whose backward had not finished.
    `makespan`: end of the last computation.
    """

    spans: tuple[Sequence[tuple[Action, float, float]], ...]
    peak_in_flight: tuple[int, ...]
    makespan: float

    @property
    def timeline(self) -> list[list[Span]]:
        """Computations of each stage, in order."""
        return [[Span(*span) for span in spans] for spans in self.spans]

    @property
    def bubble(self) -> float:
        """Share of the stages' time, from the first start to the last end, in which they idle."""
        busy = sum(end - start for spans in self.spans for _, start, end in spans)
        return 1.0 - busy / (self.makespan * len(self.spans))


def simulate(
    schedule: Schedule,
    chunks: int,
    num_microbatches: int,
    *,
    forward_costs: Sequence[float] | None = None,
    backward_costs: Sequence[float] | None = None,
    forward_only: bool = False,
    send_window: int = 0,
) -> Report:
    """Prove `schedule` and report its cost.

    Costs are per virtual stage in model order; by default a forward takes 1 and a backward 2 units.
    Proven: every forward (and, unless `forward_only`, backward) of every chunk and microbatch runs
    exactly once on every stage; a backward follows its forward; every computation has its input;
    on every communicator the messages received are the ones sent, in that order; no deadlock.

    Raises ScheduleError saying what is wrong and where.
    """
    stages = len(schedule)
    forward = forward_costs or [1.0] * (stages * chunks)
    backward = backward_costs or [2.0] * (stages * chunks)
    if len(forward) != stages * chunks or len(backward) != stages * chunks:
        raise ValueError(f"{len(forward)} and {len(backward)} costs, {stages * chunks} wanted")
    players = _stages(schedule, Size(stages, chunks, num_microbatches), forward, backward)
    _play(players, send_window)
    for player in players:
        player.check_finished(forward_only=forward_only)
    return Report(
        tuple(player.spans for player in players),
        tuple(player.peak for player in players),
        max(player.clock for player in players),
    )


def draw(report: Report, *, unit: float = 1.0) -> str:
    """The timeline as text: a row per stage, a column per `unit` of time.

    `F3` starts the forward of microbatch 3 (`F3b` that of chunk 1), `--` continues it, blank is
    idle time.
    """
    timeline = report.timeline
    chunked = any(span.action.chunk for spans in timeline for span in spans)

    def label(action: Action) -> str:
        chunk = chr(ord("a") + action.chunk) if chunked else ""
        return f"{action.op}{action.microbatch}{chunk}"

    width = 1 + max(len(label(span.action)) for spans in timeline for span in spans)
    rows = []
    for stage, spans in enumerate(timeline):
        cells = [" " * width] * max(1, round(report.makespan / unit))
        for action, start, end in spans:
            first, stop = round(start / unit), round(end / unit)
            cells[first:stop] = ["-" * (width - 1) + " "] * (stop - first)
            if stop > first:
                cells[first] = label(action).ljust(width)
        rows.append(f"stage {stage:2d} |{''.join(cells)}|")
    return "\n".join(rows)


@dataclass(slots=True)
class _Link:
    """A first-in-first-out communicator. Messages are named by their receiver's computation."""

    posted: list[int] = field(default_factory=list)
    posted_at: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    read: int = 0


@dataclass(slots=True)
class _Side:
    """Forward or backward of one stage; (chunk, microbatch) is coded as one number.

    `inbox` and `outbox`: where inputs come from and results go to. `shift`: from the code of a
    result to that of its reader. `fed`: codes whose input is the result of another computation.
    """

    inbox: _Link
    outbox: _Link
    shift: int
    fed: range
    costs: Sequence[float]
    done: bytearray


@dataclass(slots=True)
class _Stage:
    """One stage and what it has done so far."""

    index: int
    size: Size
    actions: Sequence[Action]
    sides: dict[str, _Side]
    clock: float = 0.0
    peak: int = 0
    spans: list[tuple[Action, float, float]] = field(default_factory=list)

    def play(self, window: int) -> Iterator[int]:
        """Play all actions; yield the position whenever blocked."""
        _, chunks, microbatches = self.size
        sides, forwards, in_flight, peak = self.sides, self.sides["F"].done, 0, 0
        clock = 0.0
        for position, action in enumerate(self.actions):
            op, chunk, microbatch = action
            if not (0 <= chunk < chunks and 0 <= microbatch < microbatches):
                self.fail(position, "is outside the schedule")
            side, code = sides[op], chunk * microbatches + microbatch
            if op == "recv_act" or op == "recv_grad":
                link = side.inbox
                link.posted.append(code)
                link.posted_at.append(clock)
            elif op == "send_act" or op == "send_grad":
                if not side.done[code]:
                    self.fail(position, "sends what has not been computed")
                link = side.outbox
                while len(link.sent) >= len(link.posted) + window:
                    yield position
                link.sent.append(code + side.shift)
                link.sent_at.append(clock)
            else:
                if op == "F":
                    in_flight += 1
                    if in_flight > peak:
                        self.peak = peak = in_flight
                else:
                    in_flight -= 1
                    if not forwards[code]:
                        self.fail(position, "runs before its forward")
                if side.done[code]:
                    self.fail(position, "runs a second time")
                start = clock
                if code in side.fed:
                    while (arrival := self.arrival(side, code, position)) is None:
                        yield position
                    if arrival > start:
                        start = arrival
                side.done[code] = 1
                clock = end = start + side.costs[chunk]
                self.spans.append((action, start, end))
        self.clock = clock

    def arrival(self, side: _Side, code: int, position: int) -> float | None:
        """When the input of a computation is there; None if it has not been sent yet."""
        if self.size.num_stages == 1:
            if not side.done[code - side.shift]:
                self.fail(position, "runs before the neighbouring chunk has made its input")
            return 0.0
        link, index = side.inbox, side.inbox.read
        if index >= len(link.posted):
            self.fail(position, "waits for a message whose receive is not posted")
        if link.posted[index] != code:
            self.fail(position, f"would get the message for {self.name(link.posted[index])}")
        if index >= len(link.sent):
            return None
        if link.sent[index] != code:
            self.fail(position, f"is sent the message for {self.name(link.sent[index])}")
        link.read = index + 1
        sent_at, posted_at = link.sent_at[index], link.posted_at[index]
        return sent_at if sent_at > posted_at else posted_at

    def check_finished(self, *, forward_only: bool) -> None:
        for op in ("F",) if forward_only else ("F", "B"):
            side = self.sides[op]
            if not all(side.done):
                raise ScheduleError(
                    f"stage {self.index} never runs {op} of {self.name(side.done.find(0))}"
                )
        for op, kind in (("F", "activations"), ("B", "gradients")):
            link = self.sides[op].inbox
            if not link.read == len(link.posted) == len(link.sent):
                raise ScheduleError(
                    f"stage {self.index} posts {len(link.posted)} receives of {kind}, reads "
                    f"{link.read} and is sent {len(link.sent)}"
                )

    def name(self, code: int) -> str:
        chunk, microbatch = divmod(code, self.size.num_microbatches)
        return f"chunk {chunk} microbatch {microbatch}"

    def where(self, position: int) -> str:
        op, chunk, microbatch = self.actions[position]
        return f"stage {self.index}, action {position} ({op}, chunk {chunk}, mb {microbatch})"

    def fail(self, position: int, what: str) -> NoReturn:
        raise ScheduleError(f"{self.where(position)}: {what}")


def _stages(
    schedule: Schedule, size: Size, forward: Sequence[float], backward: Sequence[float]
) -> list[_Stage]:
    """The stages on their ring. Results change chunk where they wrap around it."""
    count, chunks, microbatches = size
    codes = chunks * microbatches
    activations, gradients = [_Link() for _ in schedule], [_Link() for _ in schedule]
    stages = []
    for index, actions in enumerate(schedule):
        first, last = index == 0, index == count - 1
        forwards = _Side(
            inbox=activations[index],
            outbox=activations[(index + 1) % count],
            shift=microbatches if last else 0,
            fed=range(microbatches if first else 0, codes),
            costs=forward[index::count],
            done=bytearray(codes),
        )
        backwards = _Side(
            inbox=gradients[index],
            outbox=gradients[index - 1],
            shift=-microbatches if first else 0,
            fed=range(codes - microbatches if last else codes),
            costs=backward[index::count],
            done=bytearray(codes),
        )
        sides = dict.fromkeys(("F", "send_act", "recv_act"), forwards)
        sides |= dict.fromkeys(("B", "send_grad", "recv_grad"), backwards)
        stages.append(_Stage(index, size, actions, sides))
    return stages


def _play(stages: Sequence[_Stage], window: int) -> None:
    """Let the stages play in turn until all are done; none able to move is a deadlock."""
    playing = [(stage, stage.play(window)) for stage in stages]
    before: list[int | None] = []
    while playing:
        positions = [next(play, None) for _, play in playing]
        if positions == before:
            stuck = [s.where(p) for (s, _), p in zip(playing, before, strict=True) if p is not None]
            raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
        playing = [item for item, p in zip(playing, positions, strict=True) if p is not None]
        before = [p for p in positions if p is not None]
