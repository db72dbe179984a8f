"""What is refused before a job is submitted, and what sbatch's answers become."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.sbatch import JobShape
from megads.launch.submit import check_job, job_text, submit
from tests.launch.jobs import configured

ONE = JobShape(1, 1, 0)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for sbatch that does what it is told."""

    def make(script: str) -> None:
        file = tmp_path / "sbatch"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{path}")

    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/nothing/here")
    return make


def test_without_sbatch_a_job_can_be_shown_but_not_submitted(sbatch) -> None:
    check_job(configured(["launch.submit=false"]), ONE)
    with pytest.raises(ConfigError, match=r"sbatch is not on the PATH; .*launch\.submit=false"):
        check_job(configured(), ONE)
    sbatch("exit 0")
    check_job(configured(), ONE)


def test_what_cannot_run_is_not_submitted(sbatch) -> None:
    sbatch("exit 0")
    with pytest.raises(ConfigError) as refused:
        check_job(configured(["parallel.tp=3", "data.paths=no.txt"]), JobShape(1, 3, 3))
    assert any("parallel.tp=3" in problem for problem in refused.value.problems)
    assert any("no.txt: there is no such file" in problem for problem in refused.value.problems)


def test_files_in_a_container_are_not_looked_for(sbatch) -> None:
    sbatch("exit 0")
    words = ["data.paths=/in/there/a.txt", "run.dir=/proc/nothing", "checkpoint.load=/in/there/b"]
    inside = "launch.slurm.container_image=image"
    check_job(configured([*words, inside]), ONE)
    with pytest.raises(ConfigError, match=r"a\.txt"):
        check_job(configured(words), ONE)
    with pytest.raises(ConfigError, match="num_attention_heads") as refused:
        check_job(configured([*words, inside, "parallel.tp=3"]), JobShape(1, 3, 3))
    assert "/in/there" not in str(refused.value)


def test_packages_in_a_container_are_not_looked_for(
    sbatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch("exit 0")
    monkeypatch.setattr("megads.config.loggers.is_installed", lambda name: False)
    words = ["logging.loggers=[wandb]"]
    check_job(configured([*words, "launch.slurm.container_image=image"]), ONE)
    with pytest.raises(ConfigError, match="wandb"):
        check_job(configured(words), ONE)


def test_the_disks_of_the_nodes_are_not_looked_for(sbatch) -> None:
    sbatch("exit 0")
    words = ["parallel.zero=3", "parallel.offload=nvme", "parallel.offload_path=/proc/nothing"]
    check_job(configured(words), ONE)


def test_submission(sbatch, tmp_path: Path) -> None:
    config = configured([f"run.dir={tmp_path}"])
    sbatch('[ "$1" = --parsable ] && cat "$2" >"$2.seen" && echo "12;other-cluster"')
    said = submit(config, "the text")
    assert said.startswith(f"submitted {tmp_path}/job.sbatch as job 12; ")
    assert said.endswith(f"{tmp_path}/slurm-12.out")
    assert (tmp_path / "job.sbatch.seen").read_text() == "the text"
    sbatch('echo "invalid partition specified: gpus" >&2; exit 1')
    with pytest.raises(ConfigError, match=r"sbatch refused .*job.sbatch: invalid partition .*gpus"):
        submit(config, "the text")


def test_the_job_finds_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "PATH=" not in job_text(config, ONE, [])
    (tmp_path / "megads-train").touch()
    assert f"\nPATH={tmp_path}:$PATH\n" in job_text(config, ONE, [])
