"""Phases against a clock that is moved by hand."""

from __future__ import annotations

import pytest

from megads.parallel import phases as module
from megads.parallel.phases import REST, Phases, Span


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def step(phases: Phases, clock: Clock) -> None:
    clock.now += 1
    for microbatch in range(2):
        with phases("forward", 0, microbatch):
            clock.now += 10
            with phases.waiting("all_reduce tp"):
                clock.now += 100
            clock.now += 1000
        clock.now += 10_000


def test_time_counts_for_the_innermost_phase_and_none_is_lost(clock: Clock) -> None:
    phases = Phases()
    phases.begin()
    step(phases, clock)
    times = phases.end()
    assert times.own == {REST: 20_001, "forward": 2020}
    assert times.waits == {"all_reduce tp": 200}
    assert times.own_s == 22_021 and sum(times.by_phase.values()) == 22_221
    phases.begin()
    clock.now += 7
    assert phases.end().by_phase == {REST: 7}, "nothing of the step before"


def test_phases_outside_of_a_step_cost_it_nothing(clock: Clock) -> None:
    phases = Phases()
    step(phases, clock)
    phases.begin()
    assert phases.end().by_phase == {REST: 0}


def test_a_trace_has_every_phase_with_its_place(clock: Clock) -> None:
    phases = Phases()
    step(phases, clock)
    phases.begin_trace()
    step(phases, clock)
    spans = phases.end_trace()
    assert spans == [
        Span("forward", (0, 0), 1, 1111),
        Span("all_reduce tp", (), 11, 111),
        Span("forward", (0, 1), 11_111, 12_221),
        Span("all_reduce tp", (), 11_121, 11_221),
    ]
    assert phases.end_trace() == []


def test_others_see_the_innermost_phase_and_the_one_in_which_an_error_came(clock: Clock) -> None:
    phases = Phases()
    assert phases.current == (REST, (), False)
    with phases("forward", 0, 3):
        assert phases.current == ("forward", (0, 3), False)
        clock.now += 5
        with phases.waiting("all_reduce tp"):
            assert phases.current == ("all_reduce tp", (), True)
            assert phases.changed_s == clock.now
            clock.now += 5
        assert phases.current == ("forward", (0, 3), False)
        assert phases.changed_s == clock.now
    assert phases.current == (REST, (), False)
    with pytest.raises(ValueError), phases("backward", 0, 1), phases.waiting("receive"):
        raise ValueError
    assert phases.current == ("receive", (), True)
    with phases("data"):
        assert phases.current == ("data", (), False)
