"""`megads-train launch=slurm`: a job is shown, submitted or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megads.cli.job import run_job
from megads.data.preprocess import preprocess
from megads.errors import DataError
from tests.cli.test_train_cli import ROOT
from tests.launch.jobs import configured


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to be in, with a stand-in for sbatch on the PATH."""
    file = tmp_path / "bin/sbatch"
    file.parent.mkdir()
    file.write_text('#!/bin/sh\ncat "$2" >submitted && echo 12\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shown_and_submitted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.dp=2", "train.global_batch_size=8"]
    assert run_job(configured([*words, "launch.submit=false"]), words) == 0
    shown = capsys.readouterr().out
    assert not (place / "run").exists() and not (place / "submitted").exists()
    assert run_job(configured(words), words) == 0
    assert capsys.readouterr().out.startswith("submitted run/job.sbatch as job 12; ")
    assert (place / "submitted").read_text() == (place / "run/job.sbatch").read_text() == shown
    # Tokenizing the text is the job's work.
    assert [file.name for file in (place / "run").iterdir()] == ["job.sbatch"]


def test_too_little_data_is_not_submitted(place: Path) -> None:
    (place / "few.txt").write_text("few words")
    preprocess([place / "few.txt"], place / "few", "byte", append_eod=True)
    with pytest.raises(DataError, match="a sample needs seq_length"):
        run_job(configured(["data.paths=[few]"]), [])
    assert not (place / "submitted").exists()


def test_a_job_for_each_combination_without_loading_torch(place: Path) -> None:
    (place / "torch.py").write_text("raise SystemExit('torch was imported')")
    words = ["-m", "optim.lr=1e-3,3e-4", "parallel=tp2", "launch=slurm", "launch.submit=false"]
    done = subprocess.run(
        [sys.executable, "-m", "megads.cli.train", *words],
        env={**os.environ, "PYTHONPATH": f"{place}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    assert done.stdout.count("#!/bin/bash") == 2
    for lr in ("0.001", "0.0003"):
        assert f"\n    optim.lr={lr} \\" in done.stdout
        assert f"/optim.lr={lr}" in done.stdout.split("--output=")[1 if lr == "0.001" else 2]
