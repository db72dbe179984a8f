"""One run at a time in a run directory, whatever becomes of the one before."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.occupied import occupied

HOLD = """
import sys, time
from pathlib import Path
from megads.launch.occupied import occupied

with occupied(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def another(run_dir: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that is in `run_dir` for so long."""
    command = [sys.executable, "-c", HOLD, str(run_dir), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "in\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    with another(tmp_path, 60) as process:
        named = rf"run\.dir={tmp_path}: process {process.pid} on "
        with pytest.raises(ConfigError, match=named), occupied(tmp_path):
            pass
        process.kill()
        process.wait()
        with occupied(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    with occupied(tmp_path):
        pass


def test_a_run_that_is_just_leaving_is_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    with another(tmp_path, 0.5), occupied(tmp_path, wait_s=30):
        assert time.monotonic() - began < 20
    with another(tmp_path, 60), pytest.raises(ConfigError), occupied(tmp_path, wait_s=0.3):
        pass


def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with occupied(tmp_path), occupied(tmp_path):
        pass


def test_no_program_that_is_started_keeps_it(tmp_path: Path) -> None:
    with occupied(tmp_path):
        sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with occupied(tmp_path):
            pass
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    named = rf"run\.dir={tmp_path}: {tmp_path}/\.lock: Is a directory"
    with pytest.raises(ConfigError, match=named), occupied(tmp_path):
        pass
