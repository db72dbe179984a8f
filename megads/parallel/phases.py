"""What a process is doing, how long each thing takes, and when it happened.

One `Phases` belongs to a mesh: the executor, the collectives and the training loop enter a phase
with it, so that a step's time can be told apart and a process that hangs can be named.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

REST = "other"
"""The phase of what is in no other one."""


@dataclass(frozen=True)
class Span:
    """One phase of a traced step, in seconds since the trace began; what it held counts in it."""

    name: str
    where: tuple[int, ...]
    start_s: float
    end_s: float


class Phase(NamedTuple):
    """What is being done: the phase, its (chunk, microbatch) or nothing, and whether it waits."""

    name: str
    where: tuple[int, ...]
    waits: bool


class _Open(NamedTuple):
    """A phase that has begun."""

    name: str
    where: tuple[int, ...]
    waits: bool
    begun: Mark


class Phases:
    """The phases of a process, one inside the other; time counts for the innermost.

        with phases("forward", chunk, microbatch):
            ...
            with phases.waiting("all_reduce tp"):
                ...

    On a GPU time is measured on its stream, by events, since the host runs ahead of it. Phases are
    entered and left in order; a backward pass that autograd runs in a thread of its own counts as
    part of the call that waits for it. Waiting phases are those spent on other ranks: what is left
    of communication that nothing hides.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.changed_s = time.monotonic()
        """When a phase was last entered or left, by the monotonic clock."""
        self._on_gpu = torch.device(device).type == "cuda"
        self._interrupted: _Open | None = None
        self._stack = [_Open(REST, (), False, 0.0)]
        self._ended: list[tuple[_Open, Mark, Mark]] = []
        self._spans: list[tuple[_Open, Mark]] | None = None
        self._last: Mark | None = None

    def __call__(self, name: str, *where: int) -> Phases:
        """Enter a phase of this rank's own work; `with` leaves it."""
        return self._enter(name, where, waits=False)

    def waiting(self, name: str) -> Phases:
        """Enter a phase in which this rank waits for others."""
        return self._enter(name, (), waits=True)

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        now = self._charge()
        left = self._stack.pop()
        if self._spans is not None:
            self._spans.append((left, now))
        if kind is not None and self._interrupted is None:
            self._interrupted = left

    @property
    def current(self) -> Phase:
        """The innermost phase, from any thread; after an error, the one in which it came."""
        name, where, waits, _ = self._interrupted or self._stack[-1]
        return Phase(name, where, waits)

    def begin(self) -> None:
        """Forget what was measured: a step begins."""
        self._ended.clear()
        self._last = self._mark()

    def end(self) -> Durations:
        """What was measured since `begin`. Waits for the device."""
        last = self._charge()
        if not isinstance(last, float):
            last.synchronize()
        own: dict[str, float] = {}
        waits: dict[str, float] = {}
        for phase, start, stop in self._ended:
            kind = waits if phase.waits else own
            kind[phase.name] = kind.get(phase.name, 0.0) + _seconds(start, stop)
        self._ended.clear()
        self._last = None
        return Durations(own, waits)

    def begin_trace(self) -> None:
        """Keep every phase from now on, until `end_trace`."""
        self._spans, self._zero = [], self._mark()

    def end_trace(self) -> list[Span]:
        """The phases since `begin_trace`, by their start; the device has been waited for."""
        spans, self._spans = self._spans or [], None
        found = [
            Span(p.name, p.where, _seconds(self._zero, p.begun), _seconds(self._zero, end))
            for p, end in spans
        ]
        return sorted(found, key=lambda span: (span.start_s, -span.end_s))

    def _enter(self, name: str, where: tuple[int, ...], *, waits: bool) -> Phases:
        self._stack.append(_Open(name, where, waits, self._charge()))
        self._interrupted = None
        return self

    def _mark(self) -> Mark:
        self.changed_s = time.monotonic()
        return _event() if self._on_gpu else self.changed_s

    def _charge(self) -> Mark:
        """The time since the last change belongs to the innermost phase."""
        now = self._mark()
        if self._last is not None:
            self._ended.append((self._stack[-1], self._last, now))
            self._last = now
        return now


@dataclass(frozen=True)
class Durations:
    """Seconds by phase: this rank's own work, and what it waited for. Together the whole time."""

    own: dict[str, float]
    waits: dict[str, float]

    @property
    def by_phase(self) -> dict[str, float]:
        return self.own | self.waits

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work."""
        return sum(self.own.values())


Mark = float | torch.cuda.Event


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Mark, stop: Mark) -> float:
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event)
    return start.elapsed_time(stop) / 1000
