"""Memory by kind, phases and ranks against numbers worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megads.report.figures import Figure, phase_colors
from megads.report.runs import Run, flatten, read_runs
from megads.report.usage import (
    MAX_AREA_POINTS,
    MAX_COLUMNS,
    MAX_ROWS,
    memory_figure,
    phase_figures,
    phase_names,
    rank_figure,
)
from tests.report.made_up import config, step_line, write_run


def run_of(folder: Path, lines: list[dict[str, Any]], **changes: Any) -> Run:
    return read_runs([write_run(folder, lines, config(**changes))])[0]


def phases(runs: Sequence[Run]) -> list[Figure]:
    return phase_figures(runs, phase_colors(phase_names(runs)))


def test_memory_is_the_most_of_each_kind(tmp_path: Path) -> None:
    rng, gib = random.Random(0), 1 << 30
    a = [
        step_line(1, rng, peak_memory_bytes=3 * gib, activation_bytes=gib),
        step_line(2, rng, peak_memory_bytes=4 * gib, activation_bytes=gib // 2),
    ]
    b = [step_line(1, rng, host_bytes=5 * gib, file_bytes=gib, optimizer_bytes=0)]
    found = memory_figure([run_of(tmp_path / "a", a), run_of(tmp_path / "b", b)])
    assert found is not None
    by_name = {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in found.traces}
    assert by_name["peak of everything"] == {0: 4.0, 1: 600 / 1024}
    assert by_name["activations"] == {0: 1.0}
    assert by_name["optimizer"] == {0: 150 / 1024}
    assert by_name["parameters"] == {0: 100 / 1024, 1: 100 / 1024}
    assert by_name["states on the host"] == {2: 5.0} and by_name["states in a file"] == {2: 1.0}
    assert found.layout["yaxis"]["ticktext"] == ["a", "b", "b, offloaded"]
    assert len({t["marker"]["color"] for t in found.traces}) == len(found.traces)


def test_a_long_name_is_cut_as_text_and_not_inside_an_entity(tmp_path: Path) -> None:
    run = run_of(tmp_path / ("x" * 20 + "<<<<<<"), [step_line(1, random.Random(0))])
    found = memory_figure([run])
    assert found is not None
    assert found.layout["yaxis"]["ticktext"] == ["…" + "x" * 17 + "&lt;" * 6]


def test_no_memory_no_chart(tmp_path: Path) -> None:
    assert memory_figure([run_of(tmp_path / "a", [{"step": 1, "loss": 1.0}])]) is None


def test_phases_are_stacked_and_their_medians_compared(tmp_path: Path) -> None:
    rng = random.Random(0)
    times = [{"forward": 1.0, "save": 9.0}, {"forward": 3.0}, {"forward": 5.0, "data": 2.0}]
    a = [step_line(s, rng, phases_s=phases) for s, phases in enumerate(times, 1)]
    b = [step_line(1, rng, phases_s={"forward": 0.5, "broken": float("nan")})]
    old = [{"step": 1, "loss": 1.0}]
    runs = [run_of(tmp_path / name, lines) for name, lines in (("a", a), ("b", b), ("old", old))]
    medians, over_a, _ = phases(runs)
    assert {t["name"]: t["x"] for t in medians.traces} == {
        "forward": [3.0, 0.5],
        "save": [0.0, 0.0],
        "data": [0.0, 0.0],
    }
    assert medians.layout["barmode"] == "stack"
    assert medians.layout["yaxis"]["ticktext"] == ["a", "b"]
    assert {t["name"]: t["y"] for t in over_a.traces} == {
        "forward": [1.0, 3.0, 5.0],
        "save": [9.0, 0.0, 0.0],
        "data": [0.0, 0.0, 2.0],
    }
    assert len({t["stackgroup"] for t in over_a.traces}) == 1
    assert phases(runs[2:]) == []


def test_a_slow_step_stays_in_a_thinned_area(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 1.0, "phases_s": {"forward": 1.0}} for s in range(1, 3001)]
    lines[1777]["phases_s"] = {"forward": 1.0, "save": 50.0}
    _, area = phases([run_of(tmp_path / "a", lines)])
    save = next(t for t in area.traces if t["name"] == "save")
    assert len(save["x"]) <= MAX_AREA_POINTS
    assert save["y"][save["x"].index(1778)] == 50.0


def test_ranks_are_relative_to_the_median_of_their_step(tmp_path: Path) -> None:
    times = [[1.0, 2.0, 1.0, 1.0], [4.0, 4.0, 8.0, 4.0]]
    lines = [{"step": 50 * i, "loss": 1.0, "rank_times_s": t} for i, t in enumerate(times, 1)]
    lines.append({"step": 150, "loss": 1.0, "rank_times_s": [1.0, float("nan"), 1.0, 1.0]})
    found = rank_figure(run_of(tmp_path / "a", lines, parallel__tp=2, parallel__pp=2))
    assert found is not None
    (heat,) = found.traces
    assert heat["x"] == [50, 100]
    assert heat["y"] == [
        "rank 0: pp0 dp0 tp0",
        "rank 1: pp0 dp0 tp1",
        "rank 2: pp1 dp0 tp0",
        "rank 3: pp1 dp0 tp1",
    ]
    assert heat["z"] == [[t[r] / median(t) for t in times] for r in range(4)]


def test_ranks_of_an_earlier_layout_are_others(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 1.0, "rank_times_s": [1.0, 1.0, 2.0, 1.0]} for s in range(1, 9)]
    run = run_of(tmp_path / "a", lines, parallel__tp=2, parallel__pp=2)
    earlier = {6: flatten(config(parallel__tp=1, parallel__pp=2))}
    found = rank_figure(replace(run, earlier=earlier))
    assert found is not None and found.traces[0]["x"] == [6, 7, 8]
    found = rank_figure(replace(run, earlier={12: earlier[6]}))  # nothing came after that start
    assert found is not None and found.traces[0]["y"][1] == "rank 1: pp0 dp1 tp0"
    assert len(found.traces[0]["x"]) == 8


def test_many_ranks_and_steps_are_bounded_and_the_slow_one_is_there(tmp_path: Path) -> None:
    world, steps, slow = MAX_ROWS + 50, 2 * MAX_COLUMNS, 33
    lines = [{"step": s, "loss": 1.0, "rank_times_s": [1.0] * world} for s in range(1, steps + 1)]
    # In the second of the two steps that share a column.
    lines[223]["rank_times_s"] = [1.0] * slow + [7.0] + [1.0] * (world - slow - 1)
    found = rank_figure(run_of(tmp_path / "a", lines, parallel__pp=3))
    assert found is not None
    (heat,) = found.traces
    assert len(heat["x"]) == MAX_COLUMNS and len(heat["z"]) == MAX_ROWS
    assert max(heat["z"][heat["y"].index(f"rank {slow}")]) == 7.0  # 3 does not divide the ranks
    assert f"The {MAX_ROWS} slowest of {world} ranks" in found.caption


@pytest.mark.parametrize("times", [None, [], [1.0], "x", [1.0, None]])
def test_without_times_of_several_ranks_there_is_no_chart(tmp_path: Path, times: object) -> None:
    run = run_of(tmp_path / "a", [{"step": 1, "loss": 1.0, "rank_times_s": times}])
    assert rank_figure(run) is None
