"""The simulator finds what is wrong with broken schedules, and times right ones correctly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megads.pipeline.schedule import Action, Op, Schedule, build_schedule, send_window
from megads.pipeline.simulate import ScheduleError, draw, simulate


def remove(schedule: Schedule, stage: int, action: Action) -> None:
    schedule[stage].remove(action)


def swap(schedule: Schedule, stage: int, one: Action, other: Action) -> None:
    actions = schedule[stage]
    i, j = actions.index(one), actions.index(other)
    actions[i], actions[j] = actions[j], actions[i]


def move(schedule: Schedule, stage: int, action: Action, before: Action) -> None:
    schedule[stage].remove(action)
    schedule[stage].insert(schedule[stage].index(before), action)


def an_action(op: Op, microbatch: int) -> Action:
    return Action(op, 0, microbatch)


BREAKS: dict[str, tuple[Callable[[Schedule], object], str]] = {
    "no backward": (
        lambda s: remove(s, 0, an_action("B", 3)),
        "stage 0 never runs B of chunk 0 microbatch 3",
    ),
    "no forward": (
        lambda s: [remove(s, 2, an_action(op, 3)) for op in ("F", "B", "send_grad")],
        "deadlock: stage 0.*stage 1",
    ),
    "a forward twice": (
        lambda s: s[2].insert(9, an_action("F", 0)),
        "stage 2, action 9 .*a second time",
    ),
    "a stranger": (lambda s: s[1].append(an_action("F", 4)), "outside the schedule"),
    "backward first": (
        lambda s: swap(s, 2, an_action("F", 1), an_action("B", 1)),
        "before its forward",
    ),
    "no receive": (
        lambda s: remove(s, 1, an_action("recv_act", 3)),
        "stage 1.*whose receive is not posted",
    ),
    "no send": (
        lambda s: remove(s, 0, an_action("send_act", 3)),
        "deadlock: stage 0.*stage 1",
    ),
    "send too early": (
        lambda s: move(s, 0, an_action("send_act", 1), an_action("F", 1)),
        "sends what has not been computed",
    ),
    "sends crossed": (
        lambda s: move(s, 0, an_action("send_act", 0), an_action("send_act", 2)),
        "is sent the message for chunk 0 microbatch 1",
    ),
    "receives crossed": (
        lambda s: swap(s, 1, an_action("recv_act", 1), an_action("recv_act", 2)),
        "would get the message for chunk 0 microbatch 2",
    ),
    "late receive": (
        lambda s: move(s, 1, an_action("recv_act", 2), an_action("send_act", 2)),
        "not posted",
    ),
    "a receive too many": (
        lambda s: s[1].append(an_action("recv_grad", 0)),
        "posts 5 receives of gradients, reads 4 and is sent 4",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_schedule_is_found(fault: str) -> None:
    break_it, message = BREAKS[fault]
    schedule = build_schedule("1f1b", 3, 1, 4)
    simulate(schedule, 1, 4)
    break_it(schedule)
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, 1, 4, send_window=4)


def test_blocking_sends_towards_each_other_deadlock() -> None:
    """The classic fault: both neighbours send before either has posted its receive."""
    schedule = build_schedule("1f1b", 2, 1, 3)
    simulate(schedule, 1, 3)
    for mb in range(3):
        move(schedule, 0, an_action("recv_grad", mb), an_action("B", mb))
        move(schedule, 1, an_action("recv_act", mb), an_action("F", mb))
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0, .*send_act.*stage 1, .*send_grad"):
        simulate(schedule, 1, 3)
    simulate(schedule, 1, 3, send_window=1)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 2), ("interleaved", 3)])
def test_random_damage_never_passes(name: str, chunks: int) -> None:
    """Removing or doubling any one action breaks a schedule."""
    draws = random.Random(3)
    for _ in range(150):
        stages, microbatches = draws.randint(1, 4), draws.randint(2, 6)
        schedule = build_schedule(name, stages, chunks, microbatches)
        window = send_window(stages, microbatches)
        simulate(schedule, chunks, microbatches, send_window=window)
        actions = draws.choice(schedule)
        place = draws.randrange(len(actions))
        if draws.random() < 0.5:
            actions.pop(place)
        else:
            actions.insert(draws.randrange(len(actions)), actions[place])
        with pytest.raises(ScheduleError):
            simulate(schedule, chunks, microbatches, send_window=window)


def test_times_follow_the_costs_of_each_virtual_stage() -> None:
    # The slow second stage (forward 3, backward 5) is busy from 1 on; the first drains after it.
    report = simulate(
        build_schedule("1f1b", 2, 1, 4), 1, 4, forward_costs=[1, 3], backward_costs=[2, 5]
    )
    assert report.makespan == 1 + 4 * (3 + 5) + 2
    assert report.bubble == pytest.approx(1 - (4 * 3 + 4 * 8) / (2 * 35))
    assert [span.start for span in report.timeline[1]] == [1, 4, 9, 12, 17, 20, 25, 28]


def test_balanced_costs_have_a_smaller_bubble_than_even_layers() -> None:
    """Eight layers and a head of five: 6,2 against 4,4."""
    schedule = build_schedule("1f1b", 2, 1, 8)

    def time(first: float, second: float) -> float:
        return simulate(
            schedule,
            1,
            8,
            forward_costs=[first, second],
            backward_costs=[2 * first, 2 * second],
        ).makespan

    assert time(4, 4 + 5) / time(6, 2 + 5) > 1.2


def test_costs_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2 costs, 2 wanted"):
        simulate(build_schedule("1f1b", 2, 1, 2), 1, 2, forward_costs=[1, 1, 1])


def test_the_picture() -> None:
    assert draw(simulate(build_schedule("1f1b", 2, 1, 2), 1, 2)).splitlines() == [
        "stage  0 |F0 F1       B0 --    B1 -- |",
        "stage  1 |   F0 B0 -- F1 B1 --       |",
    ]
    chunked = draw(simulate(build_schedule("interleaved", 2, 2, 2), 2, 2, send_window=1))
    assert chunked.splitlines()[0] == (
        "stage  0 |F0a F1a F0b F1b         B0b ---     B1b --- B0a --- B1a --- |"
    )
    halves = draw(simulate(build_schedule("gpipe", 1, 1, 1), 1, 1), unit=0.5)
    assert halves == "stage  0 |F0 -- B0 -- -- -- |"
