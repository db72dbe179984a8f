"""The summary, and what configurations differ in."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

from megads.launch.activity import Activity, activity_file
from megads.report.runs import Run, flatten, read_runs
from megads.report.tables import changes, differences, summary
from tests.report.made_up import config, evaluation_line, step_line, write_run


def cells(runs: list[Run]) -> list[dict[str, str]]:
    """The summary of each run by its name."""
    table = summary(runs)
    assert list(table.header[1:]) == [run.name for run in runs]
    return [{row[0]: row[i] for row in table.rows} for i in range(1, len(runs) + 1)]


def test_a_run_in_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    (found,) = cells(read_runs([folder]))
    lines = [json.loads(t) for t in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    best = min(steps, key=lambda line: line["loss"])
    speed = median(line["tokens_per_second"] for line in steps)
    assert found["status"] == "finished: 200 steps"
    assert found["layout"] == "tp1 pp2 zero1"
    assert found["tokens"] == "819.20k"
    assert found["final loss"] == f"{steps[-1]['loss']:.4f}"
    assert found["best loss"] == f"{best['loss']:.4f} at step {best['step']}"
    assert found["final validation loss"] == f"{lines[-1]['val_loss']:.4f}"
    assert found["median tokens/s"] == f"{speed / 1e3:.2f}k"
    assert found["median MFU"] == f"{median(line['mfu'] for line in steps):.1%}"
    assert found["peak memory"] == "0.59 GiB"
    assert (found["not finite"], found["steps made again"]) == ("0", "0")


def test_runs_that_are_not_finished_or_went_wrong(tmp_path: Path) -> None:
    rng = random.Random(0)
    broken = [
        step_line(1, rng, loss=3.0),
        step_line(2, rng, loss=math.nan, grad_norm=math.nan),
        step_line(3, rng, grad_norm=math.inf, loss=math.inf),
        evaluation_line(3, 2.5),
    ]
    runs = [
        write_run(tmp_path / "broken", broken),
        write_run(tmp_path / "empty", []),
        write_run(tmp_path / "old", [{"step": 4, "loss": 1.0}], {"x": 1}),
    ]
    first, empty, old = cells(read_runs(runs))
    assert first["status"] == "step 3 of 200" and first["last action"] == "–"
    assert first["final loss"] == "inf" and first["best loss"] == "3.0000 at step 1"
    assert first["not finite"] == "2, first at step 2"
    assert first["best validation loss"] == "2.5000 at step 3"
    assert empty["status"] == "step 0 of 200" and empty["final loss"] == empty["tokens"] == "–"
    assert old["status"] == "step 4" and old["layout"] == old["peak memory"] == "–"


def test_a_run_may_have_got_further_than_its_last_line_of_a_step(tmp_path: Path) -> None:
    """Not every step is logged: an evaluation, a checkpoint and the ranks' files know more."""
    lines = [step_line(190, random.Random(0))]
    folder = write_run(tmp_path / "mine", lines)
    assert cells(read_runs([folder]))[0]["status"] == "step 190 of 200"
    write_run(folder, [*lines, evaluation_line(195, 1.0)])
    assert cells(read_runs([folder]))[0]["status"] == "step 195 of 200"
    (folder / "checkpoints/step-200").mkdir(parents=True)
    assert cells(read_runs([folder]))[0]["status"] == "step 195 of 200"
    (folder / "checkpoints/step-200/COMMIT").touch()
    activity = Activity(activity_file(folder, 0), 0)
    activity.step = 200
    activity.doing("finished")
    (found,) = cells(read_runs([folder]))
    assert found["status"] == "finished: 200 steps"
    assert "rank 0 (process " in found["last action"]
    assert found["last action"].endswith(": finished") and " 200, since" in found["last action"]


def test_what_a_run_that_failed_did_last(tmp_path: Path) -> None:
    """Each failure has moved what the ranks did to a folder of its own."""
    folder = write_run(tmp_path / "mine")
    for when, step in (("2026-11-29-230000-000001", 40), ("2026-11-30-010000-000001", 80)):
        activity = Activity(activity_file(folder, 0), 0)
        activity.step = step
        activity.doing("backward")
        (folder / "failures" / when).parent.mkdir(exist_ok=True)
        (folder / "ranks").rename(folder / "failures" / when)
    (found,) = cells(read_runs([folder]))
    assert "step 80, since" in found["last action"]
    Activity(activity_file(folder, 0), 0)
    (found,) = cells(read_runs([folder]))
    assert found["last action"].endswith(": starting")


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    values = [
        config(run__dir="runs/a"),
        config(run__dir="runs/b", optim__lr=3e-4, parallel__dp=2),
        config(run__dir="runs/c", optim__betas=[0.9, 0.99]) | {"new": {"key": "<x>"}},
    ]
    runs = read_runs([write_run(tmp_path / str(i), [], v) for i, v in enumerate(values)])
    table = differences(runs)
    assert table is not None
    assert list(table.header) == ["setting", "0", "1", "2"]
    assert {row[0]: tuple(row[1:]) for row in table.rows} == {
        "optim.lr": ("0.001", "0.0003", "0.001"),
        "optim.betas": ("[0.9, 0.95]", "[0.9, 0.95]", "[0.9, 0.99]"),
        "parallel.dp": ("null", "2", "null"),
        "new.key": ("–", "–", "<x>"),
    }
    assert differences(runs[:1]) is None


def test_a_run_without_a_configuration_differs_in_nothing(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, []) for name in "ab"]
    (folders[1] / "config.yaml").unlink()
    assert differences(read_runs(folders)) is None


def test_what_a_later_start_changed(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "a", [], config(train__steps=400))])
    assert changes(run) is None
    earlier = {step: flatten(config(train__steps=step - 1)) for step in (101, 21)}
    table = changes(replace(run, earlier=earlier))
    assert table is not None
    assert list(table.header) == ["setting", "before step 21", "before step 101", "now"]
    assert table.rows == [["train.steps", "20", "100", "400"]]
