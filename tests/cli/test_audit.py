"""Runs through `megads-train` itself, changed on the way, and what the audit says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megads.cli.audit import main
from megads.data.audit import audit
from megads.data.ledger import LEDGER
from tests.distributed import Workers
from tests.training import command_words, run_training, tiny_config, write_tokens

LIMIT_S = 120


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sources")
    return [
        write_tokens(folder / name, documents=number)
        for name, number in (("alpha", 10), ("beta", 20), ("gamma", 6))
    ]


def train(run_dir: Path, paths: list[str], *words: str) -> str:
    """The command; what it wrote to both outputs."""
    command = Path(sys.executable).with_name("megads-train")
    saved = ["checkpoint.save_last=true", "data.valid_fraction=0"]
    given = command_words(
        run_dir, "", "gpt", *saved, f"data.paths=[{','.join(paths)}]", "optim.total=20", *words
    )
    done = subprocess.run(
        [command, *given], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def steps(run_dir: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run_dir / LEDGER).read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == "step"]


def test_weights_that_change_in_the_middle_of_a_run(
    tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command twice, then the audit; the negative control spoils one step's digest."""
    train(tmp_path, sources[:2], "data.weights=[0.25,0.75]", "train.steps=3")
    noted = train(tmp_path, sources[:2], "data.weights=[0.5,0.5]", "train.steps=6")
    assert "alpha from 0.25 to 0.5, beta from 0.75 to 0.5" in " ".join(noted.split())
    assert "warning" not in noted.lower()
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "steps 1 to 6, 48 samples consumed; 2 starts" in shown
    assert [line.split()[0] for line in shown.splitlines()[2:4]] == ["alpha", "beta"]
    assert [step["given"] for step in steps(tmp_path)][2::3] == [[6, 18], [18, 30]]
    digest = steps(tmp_path)[3]["digest"]
    text = (tmp_path / LEDGER).read_text()
    (tmp_path / LEDGER).write_text(text.replace(digest, "0" * len(digest)))
    assert main([str(tmp_path)]) == 1
    assert "step 4: the plan gives samples of digest" in capsys.readouterr().err


def test_a_run_whose_everything_changes(
    tmp_path: Path, sources: list[str], workers: Workers
) -> None:
    """Ramp-up, other weights and dp, a new source in place of one, a skip, a run going on from
    another's checkpoint; each line read by the ledger is the same in that other run."""
    run, saved = tmp_path / "run", ["checkpoint.save_last=true", "data.valid_fraction=0"]

    def train_on(run_dir: Path, paths: list[str], *words: str) -> list[dict[str, Any]]:
        wanted = [*saved, f"data.paths=[{','.join(paths)}]", *words]
        return run_training(workers, tiny_config(run_dir, "", "gpt", *wanted))

    ramp = "train.batch_rampup=[4,4,16]"
    train_on(run, sources[:2], "data.weights=[0.25,0.75]", ramp, "train.steps=5")
    halves = "data.weights=[0.5,0.5]"
    train_on(run, sources[:2], halves, ramp, "train.steps=8", "parallel=dp2")
    third = [sources[2], sources[0]]
    changed = ["data.weights=[1,2]", "data.skip=[[60,70]]"]
    lines = train_on(run, third, *changed, "train.steps=11")
    assert all(line["data_wait_s"] >= 0 for line in lines)
    report = audit(run)
    assert report.problems == []
    assert [source.name for source in report.sources] == ["alpha", "beta", "gamma"]
    assert sum(source.skipped for source in report.sources) == 10
    assert lines[-1]["samples"] == report.samples == sum(s.read for s in report.sources)

    load = f"checkpoint.load={run / 'checkpoints/step-11'}"
    train_on(tmp_path / "other", third, *changed, load, "train.steps=13", "parallel=dp2")
    train_on(run, third, *changed, "train.steps=13")
    assert steps(tmp_path / "other") == steps(run)[11:]
    assert audit(tmp_path / "other").problems == audit(run).problems == []


def test_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert LEDGER in capsys.readouterr().err
