"""Every registered schedule proven over the whole range of sizes, and its known properties."""

from __future__ import annotations

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from megads.errors import ConfigError
from megads.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    build_forward_schedule,
    build_schedule,
    send_window,
)
from megads.pipeline.simulate import Report, simulate

STAGES, CHUNKS, MICROBATCHES = range(1, 17), range(1, 5), range(1, 65)
FORWARD, BACKWARD = 1, 2


def largest_group(p: int, m: int) -> int:
    return -(-m // max(1, m // p))


def expected_peak(name: str, p: int, chunks: int, m: int, stage: int) -> int:
    """Most chunk-microbatches in flight: all (gpipe), or as many as there are steps to go."""
    if name == "gpipe":
        return m * chunks
    if chunks == 1:
        return min(m, p - stage)
    ahead = 2 * (p - stage - 1) + (chunks - 1) * largest_group(p, m)
    return min(m * chunks, ahead + 1)


def check_properties(name: str, p: int, chunks: int, m: int, report: Report) -> None:
    peaks = tuple(expected_peak(name, p, chunks, m, stage) for stage in range(p))
    assert report.peak_in_flight == peaks
    # With m >= p a stage idles only while the first microbatch reaches it and the last leaves it,
    # one chunk's worth per hop. With fewer, a microbatch's own way around the ring is the limit.
    if m >= p:
        assert report.makespan == (FORWARD + BACKWARD) * (m * chunks + p - 1)
    else:
        assert report.makespan <= (FORWARD + BACKWARD) * chunks * (m + p - 1)


def window_for(name: str, p: int, m: int) -> int:
    """1f1b and gpipe run even when every send blocks; interleaving needs spare messages."""
    return max(1, largest_group(p, m) - p) if name == "interleaved" else 0


def prove(case: tuple[str, int, int]) -> int:
    """Prove one schedule for one ring size and chunk count, for every number of microbatches."""
    name, p, chunks = case
    for m in MICROBATCHES:
        if name == "forward":
            simulate(build_forward_schedule(p, chunks, m), chunks, m, forward_only=True)
            continue
        schedule = build_schedule(name, p, chunks, m)
        window = window_for(name, p, m)
        assert window <= send_window(p, m)
        check_properties(name, p, chunks, m, simulate(schedule, chunks, m, send_window=window))
    return len(MICROBATCHES)


def test_every_schedule_is_complete_and_free_of_deadlock_for_every_size() -> None:
    """1-16 stages, 1-4 chunks (1f1b has one), 1-64 microbatches; on all cores."""
    assert set(SCHEDULES) == {"gpipe", "1f1b", "interleaved"}
    cases = [
        (name, p, chunks)
        for name, p, chunks in itertools.product(SCHEDULES, reversed(STAGES), CHUNKS)
        if (name != "1f1b" or chunks == 1) and (name != "interleaved" or chunks > 1)
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        assert sum(pool.map(prove, cases)) == 64 * 16 * (4 + 1 + 3)


def test_interleaving_one_chunk_is_1f1b() -> None:
    for p, m in itertools.product((1, 2, 5, 16), (1, 2, 3, 16, 33)):
        assert build_schedule("interleaved", p, 1, m) == build_schedule("1f1b", p, 1, m)


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_forward_schedules_for_evaluation(p: int) -> None:
    for chunks in (1, 3):
        prove(("forward", p, chunks))


def test_interleaving_shrinks_the_bubble() -> None:
    plain, double = (
        simulate(build_schedule("auto", 4, c, 8), c, 8, send_window=send_window(4, 8)).bubble
        for c in (1, 2)
    )
    assert plain == pytest.approx(3 / 11)
    assert double == pytest.approx(3 / 19)


def test_the_spare_messages_of_interleaving_are_needed() -> None:
    with pytest.raises(Exception, match="deadlock"):
        simulate(build_schedule("interleaved", 4, 2, 8), 2, 8, send_window=0)


def test_two_stages_two_microbatches_by_hand() -> None:
    first: list[Action] = [
        Action("F", 0, 0),
        Action("send_act", 0, 0),
        Action("recv_grad", 0, 0),
        Action("F", 0, 1),
        Action("send_act", 0, 1),
        Action("recv_grad", 0, 1),
        Action("B", 0, 0),
        Action("B", 0, 1),
    ]
    second: list[Action] = [
        Action("recv_act", 0, 0),
        Action("F", 0, 0),
        Action("recv_act", 0, 1),
        Action("B", 0, 0),
        Action("send_grad", 0, 0),
        Action("F", 0, 1),
        Action("B", 0, 1),
        Action("send_grad", 0, 1),
    ]
    assert build_schedule("1f1b", 2, 1, 2) == [first, second]


def test_messages_are_posted_ahead_of_the_computation_before() -> None:
    schedule: Schedule = build_schedule("interleaved", 3, 2, 6)
    for actions in schedule:
        computations = [a for a in actions if a.op in ("F", "B")]
        for before, after in itertools.pairwise(computations):
            receive = Action("recv_act" if after.op == "F" else "recv_grad", *after[1:])
            if receive in actions:
                assert actions.index(receive) < actions.index(before)


def test_auto_and_refusals() -> None:
    assert build_schedule("auto", 2, 1, 3) == build_schedule("1f1b", 2, 1, 3)
    assert build_schedule("auto", 2, 2, 3) == build_schedule("interleaved", 2, 2, 3)
    with pytest.raises(ConfigError, match="choices: auto, gpipe, 1f1b, interleaved"):
        build_schedule("zb", 2, 1, 3)
    with pytest.raises(ConfigError, match="chunks=2"):
        build_schedule("1f1b", 2, 2, 3)
    with pytest.raises(ConfigError, match="at least one"):
        build_schedule("1f1b", 2, 1, 0)
