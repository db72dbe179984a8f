"""The file that says what a rank is doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.activity import LINE_BYTES, Activity, activity_file, is_since, read_activity
from megads.parallel.phases import Phases


def test_the_last_action_is_on_one_line_of_fixed_size(tmp_path: Path) -> None:
    path = activity_file(tmp_path, 3)
    activity = Activity(path, 3)
    assert path == tmp_path / "ranks" / "rank-3.txt"
    assert read_activity(path) == path.read_text().rstrip()
    assert re.search(r", step 0, since \S+ \S+: starting", path.read_text())
    phases = Phases()
    activity.step = 17
    activity.follow(phases)
    with phases("forward", 1, 4):
        activity.refresh()
        assert activity.is_own and time.monotonic() - activity.since < 1
        assert (read_activity(path) or "").endswith(": forward of chunk 1, microbatch 4")
        with phases.waiting("all_reduce tp"):
            activity.refresh()
    assert not activity.is_own
    text = read_activity(path)
    assert text is not None
    who, _, rest = text.partition(", since ")
    assert who.startswith("rank 3 (process") and who.endswith(", step 17")
    when, _, what = rest.partition(": ")
    assert what == "waiting in all_reduce tp"
    assert abs(datetime.fromisoformat(when).timestamp() - time.time()) < 2
    activity.refresh()
    assert activity.is_own and activity.what == "other"
    activity.doing("x" * 1000)
    assert not activity.is_own
    activity.refresh()
    assert activity.what == "x" * 1000, "no longer what the phases say"
    assert len(path.read_bytes()) == LINE_BYTES and path.read_bytes().count(b"\n") == 1


def test_an_error_leaves_standing_what_was_being_done(tmp_path: Path) -> None:
    activity, phases = Activity(activity_file(tmp_path, 0), 0), Phases()
    activity.follow(phases)
    with pytest.raises(ValueError), phases("backward", 0, 1):
        raise ValueError
    activity.stay()
    with phases("data"):
        activity.refresh()
    text = read_activity(activity_file(tmp_path, 0)) or ""
    assert text.endswith(": backward of chunk 0, microbatch 1") and not activity.is_own


def test_stacks_follow_the_line(tmp_path: Path) -> None:
    path = activity_file(tmp_path, 0)
    activity = Activity(path, 0)
    activity.dump("for a test")
    activity.doing("something else")
    first, *rest = path.read_text().splitlines()
    assert "something else" in first
    assert any("for a test" in line for line in rest)
    assert any("test_stacks_follow_the_line" in line for line in rest)


def test_the_start_before_is_kept(tmp_path: Path) -> None:
    path = activity_file(tmp_path, 0)
    for word in ("first", "second", "third"):
        Activity(path, 0).doing(word)
    before = path.with_name("rank-0.previous.txt")
    assert "third" in path.read_text() and "second" in before.read_text()
    assert {p.name for p in path.parent.iterdir()} == {path.name, before.name}


def test_it_outlives_a_killed_process(tmp_path: Path) -> None:
    path = activity_file(tmp_path, 0)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from megads.launch.activity import Activity\n"
        "activity = Activity(Path(sys.argv[1]), 0)\n"
        "activity.doing('the very last thing'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    started = time.time()
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path.cwd(), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert "the very last thing" in (read_activity(path) or "")
    assert is_since(path, started) and not is_since(path, time.time() + 60)


def test_training_that_begins_late_has_not_been_idle(tmp_path: Path) -> None:
    activity, phases = Activity(activity_file(tmp_path, 0), 0), Phases()
    phases.changed_s -= 1000.0  # since then nothing was timed, while the model was built
    activity.follow(phases)
    activity.refresh()
    assert activity.is_own and time.monotonic() - activity.since < 10


def test_a_full_disk(tmp_path: Path) -> None:
    """It is said at the start; later, what there is no room for is left out, and nobody dies."""
    disk, mounted = tmp_path / "disk", ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs"]
    disk.mkdir()
    if os.getuid() or subprocess.run([*mounted, str(disk)], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        activity = Activity(disk / "first", 0)
        with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        activity.doing("the line has its room")
        activity.append("stacks " * 2000)
        assert (read_activity(disk / "first") or "").endswith("the line has its room")
        with pytest.raises(ConfigError, match=r"second: cannot be written: No space left"):
            Activity(disk / "second", 0)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_is_not_there(tmp_path: Path) -> None:
    assert read_activity(tmp_path / "none") is None
    assert not is_since(tmp_path / "none", 0.0)
    assert os.listdir(tmp_path) == []


def test_a_guest_takes_nothing_until_its_place_is_free(tmp_path: Path) -> None:
    path = activity_file(tmp_path, 0)
    Activity(path, 0).doing("the run that is there")
    guest = Activity(path, 0, is_guest=True)
    assert (read_activity(path) or "").endswith("the run that is there")
    assert (read_activity(path.with_suffix(".starting.txt")) or "").endswith("starting")
    guest.take_place()
    guest.doing("the next one")
    assert (read_activity(path) or "").endswith("the next one")
    assert (read_activity(path.with_suffix(".previous.txt")) or "").endswith("that is there")
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "rank-0.previous.txt",
        "rank-0.txt",
    ]
