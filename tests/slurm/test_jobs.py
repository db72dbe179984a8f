"""Jobs on a real SLURM of two nodes: `make slurm-test` starts one and runs these.

tp2pp2 over both nodes, two tasks on each: what a run computes does not depend on how often it was
stopped, by whom, and what has ended leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import SCRIPT, Job, command, until

pytestmark = pytest.mark.skipif(
    "MEGADS_SLURM_TEST" not in os.environ, reason="needs a SLURM to itself; see make slurm-test"
)

STEPS = 80
MODEL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=64",
    "train.seq_length=16",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "eval.every=0",
    "logging.every=1",
]
WORK = [*MODEL, "parallel=tp2pp2", f"train.steps={STEPS}"]
OPTIONS = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=10", "--ntasks-per-node=2"]
TWO_NODES = ["--nodes=2", *OPTIONS, SCRIPT]
RENDERED = [
    "megads-train",
    "launch=slurm",
    "launch.slurm.tasks_per_node=2",
    "launch.slurm.gpus_per_node=0",
    "launch.slurm.cpus_per_task=1",
    "launch.slurm.time=10:00",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def whole(place: Path) -> Job:
    """The run that nothing disturbs."""
    return Job.submit(place, "whole", *TWO_NODES, *WORK)


def _is_like(job: Job, whole: Job) -> None:
    job.ends()
    whole.ends()
    assert [step for step, *_ in whole.losses] == list(range(1, STEPS + 1))
    assert job.losses == whole.losses
    assert job.processes == []


def test_stopped_twice_and_requeued_a_run_computes_the_same(place: Path, whole: Job) -> None:
    job = Job.submit(place, "stopped", *TWO_NODES, *WORK)
    job.reaches(10)
    assert len(job.processes) >= 4  # so that finding none later means something
    job.signal("--signal=USR1")
    job.is_requeued(1)
    stopped_at = len(job.records)
    assert 10 <= stopped_at < STEPS
    job.reaches(stopped_at + 5)
    job.signal("--batch", "--signal=USR1")  # to the script alone, which passes it on
    job.is_requeued(2)
    assert stopped_at + 5 <= len(job.records) < STEPS
    _is_like(job, whole)


def test_preempted_a_run_computes_the_same(place: Path, whole: Job) -> None:
    whole.ends()
    words = [*RENDERED, "launch.slurm.options=--exclusive", *WORK, "run.dir=preempted"]
    said = command(place, *words)
    assert said.startswith("submitted preempted/job.sbatch as job ")
    job = Job(said.split()[4].rstrip(";"), place, "preempted")
    job.reaches(10)
    urgent = ["--partition=high", "--nodes=2", "--ntasks-per-node=4", "--time=1"]
    other = command(place, "sbatch", "--parsable", *urgent, "--wrap=srun sleep 1")
    until(lambda: job.state != "RUNNING", "the job has left")
    assert len(job.records) < STEPS
    _is_like(job, whole)
    assert job.restarts == 1
    assert Job(other, place, "").state == "COMPLETED"


def test_a_job_that_fails_starts_again_and_one_that_is_cancelled_does_not(
    place: Path, whole: Job
) -> None:
    whole.ends()
    restart = ["launch.max_restarts=1", "checkpoint.every=10", *MODEL, "train.steps=100000"]
    job = Job.submit(place, "failed", *TWO_NODES, *restart, "parallel=tp2pp2")
    job.reaches(25)
    os.kill(_rank_process(job, 3), signal.SIGKILL)
    until(lambda: "starting again; restarts left: 0" in job.output, "the job starts again")
    before = len(job.records)
    job.reaches(before + 5)
    assert job.losses[:STEPS] != [] and job.restarts == 0
    kept = [step for step, *_ in job.losses]
    assert kept == list(range(1, len(kept) + 1))
    job.signal()
    until(lambda: job.state == "CANCELLED", "the job is cancelled", 30)
    until(lambda: not job.processes, "all of its processes are gone", 30)
    time.sleep(3.0)
    assert job.state == "CANCELLED" and command(place, "squeue", "-h") == ""


def test_an_array_of_experiments(place: Path) -> None:
    lines = ["optim.lr=1e-3 run.dir=first", "optim.lr='1e-2' run.dir=second", "optim.lr=1e-5"]
    (place / "experiments.txt").write_text("\n".join(lines) + "\n")
    words = ["--array=1-4", "--nodes=1", *OPTIONS, SCRIPT, "@experiments.txt", *MODEL]
    steps = 10 * STEPS  # on one node they are quick, and the signal must not come too late
    number = command(place, "sbatch", "--parsable", *words, "parallel=dp2", f"train.steps={steps}")
    jobs = [Job(f"{number}_{task}", place, name) for task, name in ((1, "first"), (2, "second"))]
    for job in jobs:  # of which one has the number of the whole array
        job.reaches(5)
        job.signal("--signal=USR1")
    for job in jobs:
        job.is_requeued(1)
    for job, lr in zip(jobs, (1e-3, 1e-2), strict=True):
        job.ends()
        assert [step for step, *_ in job.losses] == list(range(1, steps + 1))
        assert f"lr: {lr}" in (place / job.run_dir / "config.yaml").read_text()
    for task, complaint in ((3, "needs a run.dir="), (4, "has no line 4")):
        job = Job(f"{number}_{task}", place, "")
        job.ends("FAILED")
        assert job.field("ExitCode") == "2:0"
        assert any(complaint in file.read_text() for file in place.glob("megads-*.out"))


def _rank_process(job: Job, rank: int) -> int:
    """The process of a rank, by what the task was started with."""
    for pid in job.processes:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"SLURM_PROCID={rank}".encode() in environment and b"SLURM_STEP_ID=0" in environment:
            return pid
    raise AssertionError(f"rank {rank} has no process")
