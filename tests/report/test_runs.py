"""Reading what training left: whole, torn, old, continued."""

from __future__ import annotations

import math
import os
import random
import shutil
from pathlib import Path

import pytest

from megads.errors import DataError
from megads.report.runs import finite, flatten, number, read_runs
from tests.report.made_up import config, evaluation_line, step_line, write_run


def steps_of(folder: Path) -> list[int]:
    (run,) = read_runs([folder])
    return [line["step"] for line in run.steps]


def test_a_whole_run(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "mine")])
    assert run.name == "mine"
    assert [line["step"] for line in run.steps] == list(range(1, 201))
    assert [line["step"] for line in run.evaluations] == [50, 100, 150, 200]
    assert run.config["parallel.pp"] == 2 and run.config["optim.betas"] == [0.9, 0.95]
    assert (run.repeated, run.problems, run.earlier) == (0, (), {})
    assert run.written.timestamp() == pytest.approx(
        (tmp_path / "mine/metrics.jsonl").stat().st_mtime
    )


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_a_last_line_that_is_still_being_written(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path / "mine", steps=3) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    (run,) = read_runs([path.parent])
    assert [line["step"] for line in run.steps] == ([1, 2, 3] if cut == 1 else [1, 2])
    assert run.problems == ()


def test_lines_that_cannot_be_read_are_told_of(tmp_path: Path) -> None:
    path = write_run(tmp_path / "mine", steps=4) / "metrics.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    spoiled = [b"\x00\xff\xfe\n", b'{"loss": 1.0}\n', b"[1]\n", second[:20] + b"\n"]
    path.write_bytes(b"".join([first, *spoiled, *rest]))
    (run,) = read_runs([path.parent])
    assert [line["step"] for line in run.steps] == [1, 3, 4]
    assert len(run.problems) == 1 and "4 unreadable lines left out" in run.problems[0]


def test_values_that_are_not_finite_are_values(tmp_path: Path) -> None:
    line = step_line(1, random.Random(0), loss=math.nan, grad_norm=math.inf, mfu=None, skipped=True)
    (run,) = read_runs([write_run(tmp_path / "mine", [line])])
    loss = number(run.steps[0], "loss")
    assert loss is not None and math.isnan(loss)
    assert number(run.steps[0], "grad_norm") == math.inf
    assert number(run.steps[0], "tokens") == 4096.0
    for key in ("mfu", "skipped", "phases_s", "missing"):
        assert number(run.steps[0], key) is None
    assert finite(run.steps[0], "loss") is None and finite(run.steps[0], "tokens") == 4096.0


def test_of_a_step_that_was_made_again_the_last_line_counts(tmp_path: Path) -> None:
    rng = random.Random(0)
    first = [step_line(s, rng, loss=1.0) for s in range(1, 8)] + [evaluation_line(6, 1.0)]
    again = [step_line(s, rng, loss=2.0) for s in range(5, 10)] + [evaluation_line(6, 2.0)]
    folder = write_run(tmp_path / "mine", first + again)
    (run,) = read_runs([folder])
    assert [(line["step"], line["loss"]) for line in run.steps] == [
        *((s, 1.0) for s in range(1, 5)),
        *((s, 2.0) for s in range(5, 10)),
    ]
    assert [line["val_loss"] for line in run.evaluations] == [2.0]
    assert run.repeated == 3
    shutil.copy(folder / "metrics.jsonl", folder / "metrics.superseded.jsonl")
    assert read_runs([folder])[0].repeated == 3 + 12
    assert steps_of(folder) == list(range(1, 10))


def test_configurations_of_before(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", values=config(optim__lr=0.5))
    earlier = write_run(tmp_path / "other") / "config.yaml"
    earlier.rename(folder / "config.before-step-11.yaml")
    (folder / "config.before-step-12.yaml").write_text("a: [")
    (run,) = read_runs([folder])
    assert run.config["optim.lr"] == 0.5
    assert run.earlier[11]["optim.lr"] == 0.001
    assert (
        len(run.problems) == 1 and "config.before-step-12.yaml: cannot be read" in run.problems[0]
    )


@pytest.mark.parametrize("text", [None, "a: [", "[1, 2]", "\x00"])
def test_without_a_configuration_there_are_still_curves(tmp_path: Path, text: str | None) -> None:
    folder = write_run(tmp_path / "mine", steps=2)
    (folder / "config.yaml").unlink()
    if text is not None:
        (folder / "config.yaml").write_text(text)
    (run,) = read_runs([folder])
    assert len(run.steps) == 2 and run.config == {} and len(run.problems) == 1


def test_names_tell_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_run(tmp_path / name, steps=1) for name in ("a/x", "b/x", "b/y")]
    monkeypatch.chdir(folders[2])
    given = [*folders[:2], Path("."), Path(os.path.relpath(folders[0]))]
    assert [run.name for run in read_runs(given)] == ["a/x", "b/x", "b/y"]


def test_every_directory_without_a_run_is_named(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", steps=1)
    with pytest.raises(DataError) as caught:
        read_runs([tmp_path / "none", good, tmp_path])
    assert len(caught.value.problems) == 2
    assert all("no metrics.jsonl there; give the run.dir" in p for p in caught.value.problems)


def test_flatten() -> None:
    nested = {"a": {"b": {"c": 1}, "d": [1]}, "e": {}, "f": None}
    assert flatten(nested) == {"a.b.c": 1, "a.d": [1], "e": {}, "f": None}
