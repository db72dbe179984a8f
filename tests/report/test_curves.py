"""What is drawn is what the lines say."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from megads.report.curves import CHARTS, MAX_MARKS, MAX_POINTS, curve_figures, tokens_at
from megads.report.figures import Figure
from megads.report.runs import read_runs
from tests.report.made_up import evaluation_line, step_line, write_run


def figure(figures: list[Figure], title: str) -> Figure:
    return next(f for f in figures if f.title == title)


def test_every_curve_has_the_numbers_of_the_file(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    figures = curve_figures(read_runs(folders))
    assert [f.title for f in figures] == [chart.title for chart in CHARTS]
    for index, folder in enumerate(folders):
        lines = [json.loads(t) for t in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        for title, key, scale in [
            ("Training loss", "loss", 1.0),
            ("Gradient norm", "grad_norm", 1.0),
            ("Learning rate", "lr", 1.0),
            ("Throughput", "tokens_per_second", 1.0),
            ("Step time", "step_time_s", 1.0),
            ("Peak memory", "peak_memory_bytes", 1 / 1024**3),
        ]:
            trace = figure(figures, title).traces[index]
            assert trace["name"] == folder.name and trace["meta"]["run"] == index
            assert trace["x"] == [line["step"] for line in steps]
            assert trace["y"] == pytest.approx([line[key] * scale for line in steps])
            assert trace["meta"]["tokens"] == [line["tokens"] for line in steps]
        utilisation = figure(figures, "Utilisation").traces[2 * index : 2 * index + 2]
        assert [t["name"] for t in utilisation] == [f"{folder.name}, mfu", f"{folder.name}, hfu"]
        assert utilisation[1]["y"] == pytest.approx([100 * line["hfu"] for line in steps])
        validation = [line for line in lines if "val_loss" in line]
        total, books, web = figure(figures, "Validation loss").traces[3 * index : 3 * index + 3]
        assert total["y"] == [line["val_loss"] for line in validation]
        assert total["meta"]["tokens"] == [4096 * line["step"] for line in validation]
        assert books["name"] == f"{folder.name}, books"
        assert web["y"] == [line["val_loss_by_source"]["web"] for line in validation]


def test_an_old_run_has_the_charts_that_it_has_values_for(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 2.0, "mfu": None, "grad_norm": "high"} for s in (1, 2)]
    (figure,) = curve_figures(read_runs([write_run(tmp_path / "old", lines)]))
    assert figure.title == "Training loss"
    assert figure.traces[0]["meta"]["tokens"] == [None, None]


def test_values_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    rng = random.Random(0)
    losses = [math.inf, 3.0, 2.0, math.nan, 1.0]
    lines = [step_line(s, rng, loss=loss) for s, loss in enumerate(losses, 1)]
    run = read_runs([write_run(tmp_path / "mine", lines)])
    line, crosses = figure(curve_figures(run), "Training loss").traces
    assert (line["x"], line["y"]) == ([2, 3, 5], [3.0, 2.0, 1.0])
    assert (crosses["x"], crosses["y"]) == ([1, 4], [3.0, 2.0])
    assert crosses["text"] == ["inf at step 1", "nan at step 4"]
    assert crosses["meta"] == {"run": 0, "tokens": [4096, 4 * 4096]}


def test_a_run_without_a_finite_value_has_bounded_marks(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": math.nan} for s in range(1, 1001)]
    (found,) = curve_figures(read_runs([write_run(tmp_path / "mine", lines)]))
    assert found.traces[0]["x"] == [] and len(found.traces[1]["x"]) == MAX_MARKS


def test_a_long_run_is_thinned_and_keeps_its_spike(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 1 + 1 / s, "tokens": s} for s in range(1, 20_001)]
    lines[12_344]["loss"] = 99.0
    (found,) = curve_figures(read_runs([write_run(tmp_path / "mine", lines)]))
    (trace,) = found.traces
    assert MAX_POINTS / 2 < len(trace["x"]) <= MAX_POINTS
    assert trace["y"][trace["x"].index(12_345)] == 99.0
    assert trace["x"] == trace["meta"]["tokens"]


def test_tokens_between_logged_steps(tmp_path: Path) -> None:
    """An evaluation may come at a step that is not logged; batches may grow."""
    lines = [{"step": s, "loss": 1.0, "tokens": t} for s, t in ((10, 1000), (20, 4000))]
    (run,) = read_runs([write_run(tmp_path / "mine", [*lines, evaluation_line(15, 1.0)])])
    tokens = tokens_at(run)
    assert [tokens(s) for s in (0, 5, 10, 15, 20, 21)] == [0, 500, 1000, 2500, 4000, None]


def test_names_are_text_and_not_tags(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "<b>x & y", steps=2)])
    assert curve_figures(run)[0].traces[0]["name"] == "&lt;b&gt;x &amp; y"
