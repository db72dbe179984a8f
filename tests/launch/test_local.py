"""Workers on one machine: their environment, their failures, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megads.config.compose import compose
from megads.errors import WorkerFailure
from megads.launch import env
from megads.launch.local import Work, first_failure, handed_over, launch_local, received
from megads.launch.supervisor import STOPPED, WorkerEnd

WORKLOAD = Work("tests.launch.workload:work", preload="tests.launch.workload")
LAUNCHER = """
import sys
from tests.launch.test_local import WORKLOAD
from megads.config.compose import compose
from megads.launch.local import launch_local
try:
    status = launch_local(compose(), 2, WORKLOAD, sys.argv[1:])
except Exception as error:
    print(error)
    status = 1
sys.exit(status)
"""


def _alive(directory: Path) -> list[int]:
    """The workers that still run; a zombie has ended, whoever is late to collect it."""
    pids = [int(path.read_text()) for path in directory.glob("pid-*")]
    assert pids
    return [pid for pid in pids if _state(pid) not in ("gone", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def _launcher(what: str, directory: Path) -> subprocess.Popen[str]:
    """A launcher of two workers in a process of its own, once both can be signalled."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, what, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    _until(lambda: len(list(directory.glob("ready-*"))) == 2)
    return process


def test_workers_get_ranks_threads_and_allocator_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    before = dict(os.environ)
    assert launch_local(compose(), 2, WORKLOAD, ["environment", str(tmp_path)]) == 0
    threads = max(1, env.this_machine().cores // 2)
    for rank in range(2):
        assert (tmp_path / f"environment-{rank}").read_text().splitlines() == [
            f"RANK={rank}",
            "WORLD_SIZE=2",
            f"OMP_NUM_THREADS={threads}",
            "GLIBC_TUNABLES=glibc.malloc.arena_max=2",
            "MALLOC_TRIM_THRESHOLD_=68719476736",
        ]
    assert dict(os.environ) == before
    assert not _alive(tmp_path)


def test_one_failure_ends_all_and_its_traceback_comes_first(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailure) as failure:
        launch_local(compose(), 3, WORKLOAD, ["fail", str(tmp_path)])
    assert time.monotonic() - start < 300
    lines = str(failure.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2] == "ValueError: the first thing that went wrong"
    # A busy machine may be too slow for rank 0 to fail by itself before it is ended.
    left = " did not leave when told to, and had to be killed"
    ends = (
        f"rank 1 failed with exit status 1; ranks 0, 2{left}",
        f"rank 1 failed with exit status 1; rank 0 failed after it; rank 2{left}",
    )
    assert lines[-1] in ends
    assert failure.value.exit_status == 1
    assert not _alive(tmp_path)


def test_a_crash_is_named_before_the_errors_it_causes(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"\Arank 1 was ended by SIGSEGV") as failure:
        launch_local(compose(), 2, WORKLOAD, ["crash", str(tmp_path)])
    assert failure.value.exit_status == 1


def test_refusals_keep_their_status_and_have_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as failure:
        launch_local(compose(), 2, WORKLOAD, ["refuse", str(tmp_path)])
    assert str(failure.value) == "parallel.tp=3 is impossible"
    assert failure.value.exit_status == 2


def test_the_status_of_a_refusal_alone_is_none(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"\Arank 1 failed with exit status 2 and did not say"):
        launch_local(compose(), 2, WORKLOAD, ["mute", str(tmp_path)])


def test_a_crash_after_a_request_to_stop_is_named(tmp_path: Path) -> None:
    process = _launcher("stop, and crash", tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 was ended by SIGKILL" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_is_passed_on_and_workers_may_save(tmp_path: Path, number: signal.Signals) -> None:
    process = _launcher("stop", tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert output == ""
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert not _alive(tmp_path)


def test_further_requests_to_stop_do_no_harm(tmp_path: Path) -> None:
    process = _launcher("stop", tmp_path)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, "")
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_second_interrupt_kills(tmp_path: Path) -> None:
    process = _launcher("deaf", tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by the second Ctrl-C; what was saved before is there" in output
    assert not _alive(tmp_path)


def test_workers_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    process = _launcher("deaf", tmp_path)
    assert len(_alive(tmp_path)) == 2
    process.kill()
    process.communicate(timeout=60)
    _until(lambda: not _alive(tmp_path), seconds=10)


@pytest.mark.parametrize("how", ["absent", "exits"])
def test_a_worker_that_leaves_early_with_status_0_has_failed(how: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as failure:
        launch_local(compose(), 2, WORKLOAD, [how, str(tmp_path)])
    first = "before the run was finished" if how == "absent" else "SystemExit: 0"
    assert first in str(failure.value).splitlines()[0 if how == "absent" else -1 - 1]
    assert "rank 1 failed with exit status" in str(failure.value)
    assert failure.value.exit_status == 1


def _restarted(tmp_path: Path, what: str, *words: str) -> int:
    config = compose([f"run.dir={tmp_path}", *words])
    return launch_local(config, 2, WORKLOAD, [what, str(tmp_path)])


def test_a_failed_job_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _restarted(tmp_path, "twice", "launch.max_restarts=1") == 0
    text = caplog.text
    assert "ValueError: try again" in text and "restart 1 of 1" in text
    (kept,) = (tmp_path / "failures").iterdir()
    assert "ValueError: try again" in (kept / "failure.txt").read_text()
    line = (kept / "rank-0.txt").read_text().splitlines()[0]
    assert "rank 0" in line and "the first try" in line and line.rstrip() in text
    assert not _alive(tmp_path)


def test_no_restart_unless_asked_for_or_where_it_is_of_no_use(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="ValueError: try again"):
        _restarted(tmp_path, "twice")
    (tmp_path / "again").unlink()
    with pytest.raises(WorkerFailure, match=r"\Ano use"):
        _restarted(tmp_path, "final", "launch.max_restarts=3")


def test_a_worker_that_was_stopped_is_named_before_those_that_waited_for_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as failure:
        launch_local(compose(), 2, WORKLOAD, ["stopped", str(tmp_path)])
    first, second = str(failure.value).splitlines()[-2:]
    assert first == STOPPED
    assert second == "rank 1 was ended by SIGTERM; rank 0 failed after it"
    assert not _alive(tmp_path)


def test_no_worker_outlives_the_process_that_watches_over_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="watches over the workers was ended by SIGKILL"):
        launch_local(compose(), 2, WORKLOAD, ["unwatched", str(tmp_path)])
    _until(lambda: not _alive(tmp_path), seconds=10)


def test_first_failure_of_what_the_agent_saw() -> None:
    told = WorkerEnd(0, -15, when=1.0, told_to_leave=True)
    killed_by_us = WorkerEnd(3, -9, when=0.5, told_to_leave=True)
    late, early = WorkerEnd(1, 1, "late", 3.0), WorkerEnd(2, 1, "early", 2.0)
    crash = WorkerEnd(4, -11, when=9.0)
    assert first_failure([told, late, early, killed_by_us]) is early
    assert first_failure([told, late, early, crash, killed_by_us]) is crash
    for absent in (WorkerEnd(5, 0, "gone", 8.0), WorkerEnd(5, 1, None, 8.0)):
        assert first_failure([told, late, early, absent]) is absent
    saved = WorkerEnd(6, 3, None, 1.0)
    assert first_failure([told, absent, saved]) is absent
    assert first_failure([told, early, saved]) is saved


def test_configuration_is_handed_over_unchanged() -> None:
    config = compose(["model=llama3-8b", "parallel=tp2pp2", "optim.lr=0.1234567890123"])
    with handed_over(config) as arguments:
        assert received(arguments) == config
        assert received(["model=gpt-tiny"]) is None
        assert received([]) is None
