"""Processes that hang, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megads.launch.activity import read_activity

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import ctypes, hashlib, os, signal, sys, threading, time
from pathlib import Path
from megads.launch.activity import Activity
from megads.launch.watchdog import Watchdog

def hung(doing):
    print("hung:", doing, flush=True)
    os._exit(1)

class Work:
    current, changed_s = ("", (), False), 0.0

def work(name):
    Work.current, Work.changed_s = (name, (), False), time.monotonic()
    activity.follow(Work)

signal.signal(signal.SIGTERM, lambda *_: None)
activity = Activity(Path(sys.argv[1]), 0)
with Watchdog(activity, 0.5, hung, interval_s=0.1):
    {body}
print("left", flush=True)
"""
BODIES = {
    "sleeps": "activity.step = 4; work('data'); time.sleep(60)",
    # PyDLL keeps the interpreter lock: no Python code can run, not even the watchdog's thread.
    "keeps the lock": "work('data'); ctypes.PyDLL(None).sleep(60)",
    "works": "[(work('data'), time.sleep(0.2)) for _ in range(6)]",
    "waits": "activity.doing('waiting in all_reduce tp'); time.sleep(1.5)",
    "raises": "raise ValueError('odd')",
    "crashes": "ctypes.string_at(0)",
    # A C call that no signal ends: no handler written in Python can run in the main thread.
    "is told": "print('ready', flush=True); hashlib.pbkdf2_hmac('md5', b'', b'', 6_000_000)",
}


def start(what: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{body}", BODIES[what]), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_a_rank_that_makes_no_progress_is_ended_with_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "rank"
    started = time.monotonic()
    process = start("sleeps", path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - started < 30
    assert output.startswith("hung: no progress for") and "in step 4, data;" in output
    assert (read_activity(path) or "").endswith(": data")
    assert "as it makes no progress" in path.read_text() and "in <module>" in path.read_text()


def test_one_that_keeps_the_interpreter_for_itself_too(tmp_path: Path) -> None:
    path = tmp_path / "rank"
    process = start("keeps the lock", path)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and output == ""
    assert "Timeout" in path.read_text() and "in <module>" in path.read_text()


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [("raises", 1, "ValueError: odd"), ("crashes", -signal.SIGSEGV, "Fatal Python error: Segm")],
)
def test_an_error_or_a_crash_is_in_the_file_too(
    tmp_path: Path, what: str, status: int, words: str
) -> None:
    path = tmp_path / "rank"
    process = start(what, path)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert words in path.read_text() and "in <module>" in path.read_text()


@pytest.mark.parametrize("what", ["works", "waits"])
def test_slow_work_and_waiting_for_others_are_no_hangs(what: str, tmp_path: Path) -> None:
    process = start(what, tmp_path / "rank")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "left\n")


def test_a_signal_shows_where_a_blocked_process_is(tmp_path: Path) -> None:
    path = tmp_path / "rank"
    process = start("is told", path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    while "on SIGTERM" not in path.read_text() and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, "the call is still going on"
    assert "on SIGTERM" in path.read_text() and "in <module>" in path.read_text()
    process.communicate(timeout=60)
    assert process.returncode == 0
