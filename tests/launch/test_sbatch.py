"""What a job asks for, the file that says so, and what the script of that file does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.sbatch import JobShape, job_arguments, job_shape, render, spread, template
from tests.launch.jobs import configured


def shape(*words: str) -> JobShape:
    return job_shape(configured([w if "." in w else f"launch.slurm.{w}" for w in words]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["parallel.tp=8", "parallel.pp=4"], (4, 8, 8)),
        (["parallel.tp=2", "parallel.pp=2"], (1, 4, 4)),
        ([], (1, 1, 1)),
        (["parallel.tp=4", "parallel.pp=3"], (2, 6, 6)),
        (["parallel.tp=4", "parallel.pp=3", "gpus_per_node=4"], (3, 4, 4)),
        (["parallel.dp=16", "tasks_per_node=4"], (4, 4, 4)),
        (["parallel.dp=16", "nodes=4"], (4, 4, 4)),
        (["parallel.tp=8", "nodes=4"], (4, 8, 8)),  # dp=4 fills them
        (["parallel.tp=2", "nodes=3", "gpus_per_node=4"], (3, 4, 4)),
        (["parallel.tp=2", "tasks_per_node=1", "gpus_per_node=2"], (2, 1, 2)),
        (["parallel.tp=2", "gpus_per_node=0"], (1, 2, 0)),
        (["parallel.tp=2", "launch.backend=gloo"], (1, 2, 0)),
    ],
)
def test_shape(words: list[str], expected: tuple[int, int, int]) -> None:
    found = shape(*words)
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallel.tp=4", "parallel.pp=4", "tasks_per_node=6"],
            r"parallel.tp=4 x parallel.pp=4 makes 16 processes, which launch.slurm.tasks_per_node="
            r"6 cannot hold evenly: .* example launch.slurm.nodes=2 launch.slurm.tasks_per_node=8",
        ),
        (["parallel.dp=8", "nodes=3"], "makes 8 processes, which launch.slurm.nodes=3 cannot"),
        (["parallel.dp=8", "nodes=4", "tasks_per_node=4"], "nodes=4 and launch.slurm.tasks_per_no"),
        (["parallel.dp=2", "nodes=4"], "it would be 4 nodes with 1 each"),
        (["parallel.tp=16", "nodes=3"], "makes 16 processes"),
        (["parallel.tp=4", "tasks_per_node=4", "gpus_per_node=2"], "less than 4 tasks on a node"),
        (["gpus_per_node=0", "launch.backend=nccl"], "for the CPU, launch.backend=nccl for GPUs"),
        (["gpus_per_node=1", "launch.backend=gloo"], "would take GPUs that nobody uses"),
        (["time='5:00'"], "launch.slurm.signal_s=300 .* launch.slurm.time=5:00 is 300 s"),
        (["options=qos"], "options: qos is no option of sbatch; write it as --name value"),
        (["container_mounts=/data:/data"], "needs launch.slurm.container_image"),
    ],
)
def test_nonsense_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(*words)


def test_spread_is_even_and_uses_few_nodes() -> None:
    for world in range(1, 200):
        nodes, per_node = spread(world)
        assert nodes * per_node == world and per_node <= 8
        assert not any(world % n == 0 for n in range(per_node + 1, 9))


def rendered(words: list[str], programs: Path | None = None) -> tuple[list[str], str]:
    """The lines of the file's own part, and the part that all files share."""
    config = configured(words)
    own, mark, shared = render(config, job_shape(config), words, programs).partition("# ---- From")
    return own.splitlines(), mark + shared


def test_the_file(tmp_path: Path) -> None:
    words = [
        "parallel.tp=8",
        "parallel.pp=4",
        "data.paths=[/data/a b,/data/c]",
        "run.dir=runs/of 50%",
        "launch.slurm.partition=gpu",
        "launch.slurm.account=me",
        "launch.slurm.time=2-00:00:00",
        "launch.slurm.cpus_per_task=12",
        "launch.slurm.signal_s=600",
        "launch.slurm.requeue=false",
        "launch.slurm.options=[--qos high,--exclusive]",
        "launch.slurm.setup=[module load cuda,ulimit -c 0]",
        "launch.threads=3",
        "launch.submit=false",
        "launch.max_restarts=2",
    ]
    own, shared = rendered(words, tmp_path)
    assert "# What SLURM writes needs its folder: mkdir -p 'runs/of 50%'" in own
    assert [line for line in own if not line.startswith("# ")] == [
        "#!/bin/bash",
        "#SBATCH --job-name=megads",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --output='runs/of 50%%/slurm-%j.out'",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@600",
        "#SBATCH --no-requeue",
        "#SBATCH --qos high",
        "#SBATCH --exclusive",
        "srun_options=()",
        f"PATH={tmp_path}:$PATH",
        "export OMP_NUM_THREADS=3",
        "module load cuda",
        "ulimit -c 0",
        "set -- \\",
        "    parallel.tp=8 \\",
        "    parallel.pp=4 \\",
        "    'data.paths=[/data/a b,/data/c]' \\",
        "    'run.dir=runs/of 50%' \\",
        "    launch.threads=3 \\",
        "    launch.max_restarts=2",
        "",
    ]
    assert shared == template()[template().index("# ---- From") :]


def test_a_container_sees_the_directory_of_the_submission(tmp_path: Path) -> None:
    words = ["launch.slurm.container_image=my image.sqsh"]
    own, _ = rendered(words, tmp_path)
    assert (
        "srun_options=(--container-image='my image.sqsh' --container-mounts=\"$PWD:$PWD\" "
        '--container-workdir="$PWD")'
    ) in own
    assert not any(line.startswith("PATH=") for line in own)  # of no use in there
    own, _ = rendered([*words, "launch.slurm.container_mounts=/a:/b"], tmp_path)
    assert '--container-mounts="$PWD:$PWD",/a:/b ' in "\n".join(own)


def test_a_job_for_the_cpu_says_so_to_its_workers() -> None:
    for backend in ([], ["launch.backend=gloo"], ["launch.backend=auto"]):
        words = ["parallel.dp=2", "launch.slurm.gpus_per_node=0", *backend]
        config = configured(words)
        found = job_arguments(config, job_shape(config), words)
        assert found == ["parallel.dp=2", "launch.backend=gloo"]


def test_one_process_stays_one() -> None:
    """One task would otherwise start as many workers as it has GPUs."""
    config = configured(words := ["launch.slurm.gpus_per_node=8"])
    assert job_arguments(config, job_shape(config), words)[-1] == "parallel.dp=1"


def test_the_shipped_script_asks_for_what_a_rendered_file_does() -> None:
    own, _ = rendered(["parallel.tp=8"])
    shipped = [line for line in template().splitlines() if line.startswith("#SBATCH")]
    assert shipped == [
        "#SBATCH --output=%x-%j.out" if "--output" in line else line
        for line in own
        if line.startswith("#SBATCH")
    ]


STUBS = {
    "srun": 'printf "%s " "$@" >>srun.log; echo >>srun.log\n'
    "status=$(sed -n 1p statuses); sed -i 1d statuses\n"
    "if [[ $status == signalled* ]]; then\n"
    "  trap 'exit 3' USR1; kill -${status#signalled } $PPID\n"
    "  for _ in {1..500}; do sleep 0.01; done\n"
    "fi\n"
    "exit $status",
    "squeue": "cat state",
    "scontrol": 'echo "$@" >>scontrol.log',
}


@pytest.fixture
def job(tmp_path: Path):
    """Runs the shipped script where srun ends with these statuses; commands are stand-ins."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(statuses: list[object], *words: str, state: str = "RUNNING", **environ: str):
        (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        (tmp_path / "state").write_text(f"{state}\n")
        done = subprocess.run(
            ["bash", "-c", template(), "job", *words],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environ},
            capture_output=True,
            text=True,
            timeout=30,
        )
        logs = [tmp_path / f"{name}.log" for name in ("srun", "scontrol")]
        calls = [log.read_text().splitlines() if log.exists() else [] for log in logs]
        for log in logs:
            log.unlink(missing_ok=True)
        return done.returncode, calls[0], calls[1], done.stderr

    return run


@pytest.mark.parametrize(
    ("statuses", "restarts", "state", "starts", "requeued"),
    [
        ([0], 2, "RUNNING", 1, False),
        ([2], 2, "RUNNING", 1, False),  # it would be wrong again
        ([3], 2, "RUNNING", 1, True),
        ([138], 2, "RUNNING", 1, True),  # SIGUSR1 and SIGTERM before there were handlers
        ([143], 2, "RUNNING", 1, True),
        ([3], 2, "COMPLETING", 1, False),  # cancelled
        ([137], 2, "CANCELLED", 1, False),
        ([1], 0, "RUNNING", 1, False),
        ([1, 137, 0], 2, "RUNNING", 3, False),
        ([1, 3], 2, "RUNNING", 2, True),
        ([1, 1, 1], 2, "RUNNING", 3, False),
        (["signalled USR1"], 0, "RUNNING", 1, True),  # the script alone was: it passes it on
        (["signalled TERM"], 0, "RUNNING", 1, True),
    ],
)
def test_what_the_script_does_with_a_status(
    job, statuses: list[object], restarts: int, state: str, starts: int, requeued: bool
) -> None:
    words = ["parallel=dp2", f"launch.max_restarts={restarts}"]
    status, srun, scontrol, errors = job(statuses, *words, state=state)
    assert status == (3 if "signalled" in str(statuses[-1]) else statuses[-1])
    assert len(srun) == starts
    assert scontrol == (["requeue 7"] if requeued else [])
    assert ("--time is too short" in errors) == requeued  # as it was within a minute


def test_workers_start_nothing_themselves_and_have_their_cpus(job) -> None:
    given = ["launch=slurm", "launch.where=slurm", "launch.max_restarts=1", "data.paths=[a b]"]
    _, srun, _, _ = job([0], *given)
    start = "--wait=30 --kill-on-bad-exit=0 megads-train "
    assert srun == [
        f"{start}launch.where=here launch.max_restarts=0 launch=slurm data.paths=[a b] "
    ]


def test_an_array_takes_its_arguments_from_a_line(job, tmp_path: Path) -> None:
    lines = ["run.dir=a", "optim.lr='1e-3' run.dir='my run'", "optim.lr=1e-4"]
    (tmp_path / "list").write_text("\n".join(lines))
    words = ["@list", "parallel=dp2"]
    array = {"SLURM_ARRAY_JOB_ID": "7"}  # one of its tasks has this number as its own
    _, srun, scontrol, _ = job([3], *words, **array, SLURM_ARRAY_TASK_ID="2")
    assert scontrol == ["requeue 7_2"]
    assert srun[0].endswith("max_restarts=0 optim.lr=1e-3 run.dir=my run parallel=dp2 ")
    for task, complaint in (
        ("3", "needs a run.dir= of its own: optim.lr=1e-4"),
        ("4", "no line 4"),
    ):
        status, srun, _, errors = job([0], *words, **array, SLURM_ARRAY_TASK_ID=task)
        assert (status, srun) == (2, []) and complaint in errors
    status, srun, _, errors = job([0], *words)
    assert (status, srun) == (2, []) and "@list is for an array" in errors
    assert job([0], "launch.max_restarts=many")[0] == 2
