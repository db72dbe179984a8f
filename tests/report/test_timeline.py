"""Measured timelines are read as they are, and simulated from their medians."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megads.report import timeline_figure
from megads.report.figures import Figure, phase_colors
from megads.report.runs import Run, flatten, read_runs
from megads.report.timeline import PASSES, ProfiledStep, read_profile
from megads.report.timeline_figure import MAX_TIMELINES, timeline_figures
from tests.report.made_up import config, write_profile, write_run


def profile(folder: Path, **changes: Any) -> tuple[list[ProfiledStep], list[str]]:
    problems: list[str] = []
    return read_profile(folder, lambda step: flatten(config(**changes)), problems), problems


def figures(profiles: list[tuple[Run, ProfiledStep]]) -> list[Figure]:
    return timeline_figures(profiles, phase_colors(["data", "receive", "optimizer"]))


def edit(folder: Path, change: Callable[[dict[str, Any]], None], rank: int = 1) -> None:
    path = folder / f"profile/step-5/rank-{rank}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches", "schedule"),
    [(1, 1, 3, "auto"), (2, 1, 4, "1f1b"), (4, 1, 6, "gpipe"), (2, 3, 4, "interleaved")],
)
def test_a_step_as_it_was_simulated_is_simulated_as_it_was(
    tmp_path: Path, pp: int, chunks: int, microbatches: int, schedule: str
) -> None:
    """Every pass in the same place and time, and so the same bubble."""
    costs = [0.010 + 0.003 * virtual for virtual in range(pp * chunks)]
    write_profile(
        tmp_path, pp=pp, chunks=chunks, microbatches=microbatches, schedule=schedule, costs=costs
    )
    sizes = {"pp": pp, "chunks": chunks, "schedule": schedule}
    (found,), problems = profile(tmp_path, **{f"parallel__{k}": v for k, v in sizes.items()})
    assert (problems, found.reason, found.step) == ([], "", 5)
    assert found.simulated is not None
    measured, simulated = found.measured.passes(), found.simulated.passes()
    assert len(measured) == 2 * pp * chunks * microbatches
    assert [(s, *span[0:1], *span[3:]) for s, span in measured] == [
        (s, *span[0:1], *span[3:]) for s, span in simulated
    ]
    for key in (1, 2):
        assert [s[key] for _, s in measured] == pytest.approx([s[key] for _, s in simulated])
    assert found.measured.bubble == pytest.approx(found.simulated.bubble)


def test_bubbles_worked_out_by_hand(tmp_path: Path) -> None:
    """Two stages, a forward 10 and a backward 20 ms, the last stage 15 and 30; four microbatches.

    The last stage is busy from 10 to 190 ms; the first begins at 0 and ends its last backward at
    210: 120 + 180 ms of work in 2 x 210.
    """
    write_profile(tmp_path)
    (found,), _ = profile(tmp_path)
    assert found.measured.bounds == pytest.approx((0.003, 0.213))
    assert found.measured.bubble == pytest.approx(1 - 300 / 420)


def test_delays_widen_the_measured_bubble_and_not_the_simulated_one(tmp_path: Path) -> None:
    write_profile(tmp_path, delay=0.042)
    (found,), _ = profile(tmp_path)
    assert found.simulated is not None
    assert found.simulated.bubble == pytest.approx(1 - 300 / 420)
    # The last stage ends at 232 of 0.. instead of 190, after the first stage's 210.
    assert found.measured.bubble == pytest.approx(1 - 300 / 464)


def test_simulated_passes_take_the_median_of_their_stage(tmp_path: Path) -> None:
    write_profile(tmp_path)

    def slow_first_forward(content: dict[str, Any]) -> None:
        first = next(s for s in content["spans"] if s["name"] == "forward")
        first["start_s"] = first["end_s"] - 0.3

    edit(tmp_path, slow_first_forward)
    (found,), _ = profile(tmp_path)
    assert found.simulated is not None
    for stage, forward in ((0, 0.010), (1, 0.015)):
        spans = [s for s in found.simulated.rows[stage] if s.name == "forward"]
        assert [s.seconds for s in spans] == pytest.approx([forward] * 4)


def test_positions_and_steps_are_kept_apart(tmp_path: Path) -> None:
    write_profile(tmp_path, 5, tp=2)
    write_profile(tmp_path, 12)
    (tmp_path / "profile/step-5/rank-0.trace.json").write_text("{}")  # torch.profiler's
    found, problems = profile(tmp_path)
    assert [(p.step, p.dp, p.tp) for p in found] == [(5, 0, 0), (5, 0, 1), (12, 0, 0)]
    assert problems == [] and all(p.simulated for p in found)


def drop_last_backward(content: dict[str, Any]) -> None:
    spans = content["spans"]
    spans.remove(next(s for s in reversed(spans) if s["name"] == "backward"))


def drop_chunk(content: dict[str, Any]) -> None:
    for span in content["spans"]:
        span.pop("chunk", None)


@pytest.mark.parametrize(
    ("change", "changes", "reason"),
    [
        (drop_last_backward, {}, "stage 1: 3 backward passes of 4"),
        (drop_chunk, {}, "a pass without chunk or microbatch"),
        (lambda c: c.update(spans=[]), {}, "stage 1: 0 forward passes of 4"),
        (lambda c: None, {"parallel__pp": 4}, "files of stages [0, 1], parallel.pp=4"),
        (lambda c: None, {"parallel__schedule": "odd"}, "parallel.schedule=odd is unknown"),
        (lambda c: None, {"parallel__chunks": "x"}, "invalid literal"),
    ],
)
def test_what_cannot_be_simulated_is_still_drawn(
    tmp_path: Path, change: Any, changes: dict[str, Any], reason: str
) -> None:
    write_profile(tmp_path)
    edit(tmp_path, change)
    (found,), _ = profile(tmp_path, **changes)
    assert found.simulated is None and reason in found.reason
    run = read_runs([write_run(tmp_path, steps=1)])[0]
    (figure,) = figures([(run, found)])
    assert "yaxis2" not in figure.layout and f"Not simulated: {found.reason}" in figure.caption


def test_files_that_cannot_be_read_are_told_of(tmp_path: Path) -> None:
    write_profile(tmp_path)
    (tmp_path / "profile/step-5/rank-0.json").write_text('{"step": 5, "spa')
    edit(tmp_path, lambda content: content["spans"][0].update(start_s=float("nan")))
    found, problems = profile(tmp_path)
    assert found == [] and len(problems) == 2
    assert "rank-0.json: left out: JSONDecodeError" in problems[0]
    assert "rank-1.json: left out: ValueError: a span from nan to" in problems[1]


def test_a_figure_draws_every_span_where_it_was(tmp_path: Path) -> None:
    write_profile(tmp_path, chunks=2, microbatches=2)
    run = read_runs([write_run(tmp_path, steps=1, values=config(parallel__chunks=2))])[0]
    (found,) = read_profile(tmp_path, run.config_at, [])
    (figure,) = figures([(run, found)])
    drawn = {
        (trace["yaxis"], trace["name"], stage, base, width)
        for trace in figure.traces
        for stage, base, width in zip(trace["y"], trace["base"], trace["x"], strict=True)
    }
    for axis, timeline in (("y", found.measured), ("y2", found.simulated)):
        assert timeline is not None
        assert {d[1:] for d in drawn if d[0] == axis} == {
            (s.name, stage, round(1000 * s.start, 4), round(1000 * s.seconds, 4))
            for stage, spans in timeline.rows.items()
            for s in spans
        }
    forward = figure.traces[0]
    assert forward["name"] == "forward" and set(forward["text"]) == {"0", "1"}
    assert set(forward["marker"]["opacity"]) == {1.0, 0.75}
    assert f"bubble {found.measured.bubble:.1%}" in figure.caption
    assert figure.caption.index("Measured") < figure.caption.index("Simulated")


def test_of_too_many_spans_the_shortest_are_left_out_and_passes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 passes and more than three others."""
    write_profile(tmp_path)
    run = read_runs([write_run(tmp_path, steps=1)])[0]
    (found,) = read_profile(tmp_path, run.config_at, [])
    others = [s for row in found.measured.rows.values() for s in row if s.name not in PASSES]
    longest = sorted((s.seconds for s in others), reverse=True)[:3]
    monkeypatch.setattr(timeline_figure, "MAX_SPANS", 19)
    (figure,) = figures([(run, found)])
    drawn = [
        (trace["name"], seconds)
        for trace in figure.traces
        if trace["yaxis"] == "y"
        for seconds in trace["x"]
    ]
    assert sum(name in PASSES for name, _ in drawn) == 16
    assert sorted((s for name, s in drawn if name not in PASSES), reverse=True) == pytest.approx(
        [1000 * s for s in longest], abs=1e-3
    )
    left_out = len(others) - 3
    assert f"The shortest {left_out} of {16 + len(others)} spans are left out" in figure.caption


def test_a_step_is_compared_with_the_schedule_it_had(tmp_path: Path) -> None:
    write_profile(tmp_path, 5, pp=4, schedule="gpipe")
    write_profile(tmp_path, 12)
    folder = write_run(tmp_path, steps=1)
    before = config(parallel__pp=4, parallel__schedule="gpipe")
    (folder / "config.before-step-12.yaml").write_text(json.dumps(before))
    run = read_runs([folder])[0]
    first, second = read_profile(tmp_path, run.config_at, [])
    for found, pp in ((first, 4), (second, 2)):
        assert found.simulated is not None and len(found.simulated.rows) == pp
        assert found.simulated.bubble == pytest.approx(found.measured.bubble)
    # All forwards come first in gpipe, which the newest schedule would not have.
    assert first.simulated is not None
    assert [s.name for s in first.simulated.rows[3]] == ["forward"] * 4 + ["backward"] * 4


def test_the_page_holds_so_many_timelines_and_all_first_positions(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path, steps=1)])[0]
    for step in range(1, 5):
        write_profile(tmp_path, step, tp=8, microbatches=1)
    profiles = [(run, p) for p in read_profile(tmp_path, run.config_at, [])]
    titles = [f.title for f in figures(profiles)]
    assert len(profiles) == 32 and len(titles) == MAX_TIMELINES
    assert titles[:4] == [f"{run.name}, step {step}, dp 0, tp 0" for step in range(1, 5)]
