"""The command as users run it: refusals, launchers, resuming, stopping."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.occupied import occupied

TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=64",
    "train.seq_length=16",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "optim.warmup=0",
    "eval.every=0",
    "logging.every=1",
    "optim.schedule=constant",
    "launch.backend=gloo",
    "run.dir=run",
]
COMMAND = [sys.executable, "-m", "megads.cli.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ROOT = Path(__file__).resolve().parent.parent.parent


def _environment(directory: Path, **changes: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    temporary = directory.with_name(f"{directory.name}-tmp")
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), **changes}


def _run(
    directory: Path, *arguments: str, command: list[str] = COMMAND, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        cwd=directory,
        env=_environment(directory, **environment),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def _steps(directory: Path) -> list[int]:
    lines = (directory / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path entry on which importing torch fails."""
    directory = tmp_path_factory.mktemp("poison")
    (directory / "torch").mkdir()
    (directory / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    return os.pathsep.join([str(directory), str(ROOT)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["model=gpt-175b", "parallel=tp8pp16"],
            ["needs 128 devices", "torchrun --nnodes=16 ", "srun --nodes=16 "],
        ),
        (["model.hiden_size=64"], ["megads-train: model.hiden_size", "hidden_size"]),
        (["kernels.norm=tritn"], ["megads-train: kernels.norm=tritn", "compiled"]),
        (["kernels.attention=compiled"], ["kernels.attention=compiled", "rotary"]),
        (["parallel=tp3"], ["model.num_attention_heads=4", "parallel.tp=3"]),
        (["data.paths=[nowhere/corpus.txt]"], ["nowhere/corpus.txt"]),
        (["run.dir=/dev/null/run"], ["run.dir=/dev/null/run"]),
        (["launch.slurm.nodes=4"], ["launch.slurm.nodes=4: only read with launch=slurm"]),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    tmp_path: Path, without_torch: str, arguments: list[str], words: list[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run(tmp_path, *arguments, PYTHONPATH=without_torch)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    # Processor time, which a busy machine does not stretch.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", ["text.jsonl, line 1", "not valid JSON"]),
        (b'{"other": "x"}', ["text.jsonl, line 1", "no key 'text'"]),
    ],
)
def test_text_that_cannot_be_tokenized_is_refused_before_any_worker(
    tmp_path: Path, without_torch: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / "text.jsonl").write_bytes(content)
    arguments = [*TINY, "parallel=dp2", "data.paths=[text.jsonl]"]
    done = _run(tmp_path, *arguments, PYTHONPATH=without_torch)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert list((tmp_path / "run" / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("some words, " * 100, "train.steps=8 needs 16 samples but data.epochs and data.limits"),
        ("few words", "a sample needs seq_length + 1 = 17"),
    ],
)
def test_too_little_data_is_refused_before_any_worker(
    tmp_path: Path, without_torch: str, text: str, named: str
) -> None:
    (tmp_path / "text.txt").write_text(text)
    settings = ["data.paths=[text.txt]", "train.steps=8", "data.limits=5"]
    done = _run(tmp_path, *TINY, *settings, PYTHONPATH=without_torch)
    assert done.returncode == 2 and named in done.stderr, done.stderr


def test_text_is_tokenized_before_torch_is_loaded(tmp_path: Path, without_torch: str) -> None:
    (tmp_path / "text.txt").write_text("some words, " * 100)
    done = _run(tmp_path, *TINY, "data.paths=[text.txt]", PYTHONPATH=without_torch)
    assert done.stderr.splitlines()[0].startswith("megads-train: tokenizing text.txt into run/data")
    assert "torch was imported" in done.stderr
    files = sorted((tmp_path / "run" / "data").iterdir())
    assert [file.suffix for file in files] == [".bin", ".idx"]
    before = [file.stat().st_mtime_ns for file in files]
    done = _run(tmp_path, *TINY, "data.paths=[text.txt]", PYTHONPATH=without_torch)
    assert "tokenizing" not in done.stderr
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize("vocab_size", [285, 286])
def test_a_tokenizer_of_too_few_ids_is_warned_of(
    tmp_path: Path, without_torch: str, vocab_size: int
) -> None:
    """Nine tenths of 285 are less than the 257 ids of bytes, those of 286 are more."""
    words = [*TINY, f"model.vocab_size={vocab_size}"]
    done = _run(tmp_path, *words, PYTHONPATH=without_torch)
    warning = f"data.tokenizer=byte has 257 ids, model.vocab_size={vocab_size}: the model never"
    assert (warning in done.stderr) == (vocab_size == 286), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_world_size_is_said_once_and_nothing_waits(tmp_path: Path, rank: int) -> None:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}
    done = _run(tmp_path, *TINY, "parallel=tp2", **place, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert done.returncode == 2
    if rank == 0:
        assert "parallel.tp=2" in done.stderr and "there are 3" in done.stderr
    else:
        assert done.stderr == ""


def test_under_torchrun(tmp_path: Path) -> None:
    arguments = ["-m", "megads.cli.train", *TINY, "parallel=dp2", "train.steps=2"]
    done = _run(tmp_path, *arguments, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert _steps(tmp_path) == [1, 2]


FAILS_ONCE = """
import os, sys
from megads.cli.train import main
from megads.train import loop
train_step = loop.train_step
def failing(parts, **words):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and parts.state.step == 3 and os.environ["RANK"] == "1":
        raise ValueError("once")
    return train_step(parts, **words)
loop.train_step = failing
sys.exit(main())
"""


def test_under_torchrun_that_starts_again(tmp_path: Path) -> None:
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    arguments = ["--max-restarts=1", "fails_once.py", *TINY, "parallel=dp2", "train.steps=4"]
    arguments.append("checkpoint.every=2")
    done = _run(tmp_path, *arguments, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "ValueError: once" in done.stderr, done.stderr
    assert "step-2: step 2" in done.stdout and _steps(tmp_path) == [1, 2, 3, 4]


def test_failure_inside_a_worker_is_shown_once(tmp_path: Path) -> None:
    arguments = [*TINY, "parallel=dp2", "optim.lr=1e30", "optim.clip=0", "optim.name=sgd"]
    done = _run(tmp_path, *arguments, "train.steps=20")
    assert done.returncode == 1
    assert done.stderr.count("gradient norm") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_interrupted_before_there_are_workers(tmp_path: Path) -> None:
    """Ctrl-C while text is being tokenized: no traceback, no checkpoint, the shell's status."""
    (tmp_path / "long.txt").write_bytes(b"seconds of work\f" * 2**21)
    process = subprocess.Popen(
        [*COMMAND, "model=gpt-tiny", "run.dir=run", "data.paths=[long.txt]"],
        cwd=tmp_path,
        # As in a terminal; a shell has what it runs in the background ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert "tokenizing" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not (tmp_path / "run/checkpoints").exists()


def _start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *TINY, *arguments],
        cwd=directory,
        env=_environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_a_directory_in_which_another_run_is_at_work_is_refused(tmp_path: Path) -> None:
    """By the launcher at once, and by all ranks where there is another launcher."""
    (tmp_path / "run").mkdir()
    named = f"run.dir=run: process {os.getpid()} on "
    with occupied(tmp_path / "run"):
        done = _run(tmp_path, *TINY)
        assert done.returncode == 2 and named in done.stderr, done.stderr
        arguments = ["-m", "megads.cli.train", *TINY, "parallel=dp2", "launch.timeout_s=8"]
        done = _run(tmp_path, *arguments, command=TORCHRUN, OMP_NUM_THREADS="1")
        assert done.returncode == 1 and named in done.stderr, done.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert list((tmp_path / "run/ranks").glob("rank-?.txt")) == []


def test_stopped_by_signals_resumed_and_finished(tmp_path: Path) -> None:
    """One worker is told to stop; then the launcher, before it has workers; then time is up."""
    endless = ["parallel=dp2", "train.steps=100000"]
    metrics, ranks = tmp_path / "run/metrics.jsonl", tmp_path / "run/ranks"
    process = _start(tmp_path, *endless)
    _until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    second = re.search(r"\(process (\d+) on", (ranks / "rank-1.txt").read_text())
    assert second is not None
    named = f"process {process.pid} on "
    with pytest.raises(ConfigError, match=named), occupied(tmp_path / "run"):
        pass
    os.kill(int(second[1]), signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    stopped = _steps(tmp_path)[-1]
    assert (tmp_path / f"run/checkpoints/step-{stopped}").is_dir()

    process = _start(tmp_path, *endless)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    _until(process, lambda: children.read_text() != "")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert _steps(tmp_path) == list(range(1, stopped + 2))

    done = _run(tmp_path, *TINY, *endless, "launch.stop_after=1s")
    assert (done.returncode, done.stderr) == (3, ""), done.stderr
    stopped += 2
    assert _steps(tmp_path) == list(range(1, stopped + 1))

    resumed = [*TINY, "parallel=pp2", f"train.steps={stopped + 2}"]
    done = _run(tmp_path, *resumed)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert _steps(tmp_path) == list(range(1, stopped + 3))

    before = metrics.read_bytes()
    done = _run(tmp_path, *resumed)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert metrics.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert list(tmp_path.with_name(f"{tmp_path.name}-tmp").iterdir()) == []
