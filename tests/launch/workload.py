"""A stand-in for a worker: does one thing that a worker can do, chosen by the first argument."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megads.errors import CheckpointError, LayoutError
from megads.launch.activity import Activity, activity_file
from megads.launch.env import started
from megads.launch.worker import end_with, failed, finished, leave


def work(arguments: Sequence[str]) -> None:
    place = started()
    assert place is not None
    what, directory = arguments[0], Path(arguments[1])
    end_with(place.launcher_pid)
    (directory / f"pid-{place.rank}").write_text(str(os.getpid()))
    try:
        act(what, place.rank, directory)
    except BaseException as error:
        leave(failed(place, error)[0])
    finished(place)
    leave(0)


def act(what: str, rank: int, directory: Path) -> None:
    if what == "environment":
        names = (
            "RANK",
            "WORLD_SIZE",
            "OMP_NUM_THREADS",
            "GLIBC_TUNABLES",
            "MALLOC_TRIM_THRESHOLD_",
        )
        lines = [f"{name}={os.environ.get(name)}" for name in names]
        (directory / f"environment-{rank}").write_text("\n".join(lines))
    elif what in ("fail", "crash"):
        # Rank 1 fails; rank 0 notices and fails of that; the others ignore requests to leave.
        if rank == 1:
            if what == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError("the first thing that went wrong")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            wait_for_end_of(directory / "pid-1")
            raise ConnectionError("a peer is gone")
        time.sleep(600)
    elif what == "refuse":
        raise LayoutError("parallel.tp=3 is impossible")
    elif what == "mute":
        if rank == 1:
            os._exit(2)
        time.sleep(600)
    elif what == "stop, and crash":
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        (directory / f"ready-{rank}").touch()
        signal.pause()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    elif what == "stop":
        # Like a training loop: finish the step, save, leave with 3.
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        (directory / f"ready-{rank}").touch()
        while not asked:
            time.sleep(0.02)
        time.sleep(0.5)
        (directory / f"saved-{rank}").touch()
        leave(3)
    elif what in ("absent", "exits"):
        # Rank 1 ends as if all was well; rank 0 notices and fails of that.
        if rank == 1:
            os._exit(0) if what == "absent" else sys.exit(0)
        wait_for_end_of(directory / "pid-1")
        raise ConnectionError("a peer is gone")
    elif what in ("twice", "final"):
        # The first start fails, and a second one would go well.
        first = not (directory / "again").exists()
        if rank == 0 and first:
            Activity(activity_file(directory, rank), rank).doing("the first try")
            (directory / "again").touch()
            raise CheckpointError("no use") if what == "final" else ValueError("try again")
        if first:
            time.sleep(600)
    elif what == "stopped":
        # Rank 1 is stopped; rank 0 waits for it until it has waited too long.
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        wait_for_end_of(directory / "pid-1", "T")
        time.sleep(0.2)
        raise TimeoutError("nobody came")
    elif what == "unwatched":
        # Rank 0 kills the supervisor; both are deaf, and rank 1 is stopped.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_end_of(directory / "pid-1", "T")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / f"ready-{rank}").touch()
        time.sleep(600)


def wait_for_end_of(file: Path, state: str = "Z") -> None:
    """Return when the process whose id is in `file` is gone, or a zombie (T: stopped)."""
    while not file.exists() or not file.read_text():
        time.sleep(0.01)
    stat = Path("/proc", file.read_text(), "stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(")")[2].split()[0] != state:
            time.sleep(0.01)
