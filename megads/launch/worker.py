"""What a worker owes the process that started it: the reason of a failure, and to end with it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megads.errors import MegadsError
from megads.launch.env import Started

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def describe(error: BaseException) -> str:
    """The error for a reader: errors made for the user as they are, others with a traceback."""
    if isinstance(error, MegadsError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def exit_status(error: BaseException) -> int:
    """The status that a process ends with when it stops for `error`; never that of success."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1
    return error.exit_status if isinstance(error, MegadsError) else 1


def record_failure(error: BaseException, path: Path | None) -> None:
    """Write the launcher's error file, in the form that torch's elastic agent reads.

    Without one (SLURM) there is nothing to write. The file appears whole or not at all.
    """
    if path is None:
        return
    now = time.time()
    details = {
        "py_callstack": describe(error),
        "timestamp": str(int(now)),
        "time": now,
        "final": isinstance(error, MegadsError) and not error.may_pass,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    temporary = path.with_suffix(".part")
    with suppress(OSError):  # of a full disk: the exit status still tells, and stderr
        temporary.write_text(json.dumps({"message": message}))
        temporary.replace(path)


def end_file(error_file: Path) -> Path:
    """What a worker leaves beside its error file when all that it had to do is done."""
    return error_file.with_suffix(".done")


def finished(place: Started) -> None:
    """This worker has done its work: the launcher takes no other end with status 0 for one."""
    if place.launcher_pid is not None and place.error_file is not None:
        end_file(place.error_file).touch()


def failed(place: Started, error: BaseException) -> tuple[int, str | None]:
    """Report that this rank stops for `error`: its exit status, and what it says on stderr, if it
    is the one to speak.

    The local launcher shows the first failure of all ranks, so its workers are silent.
    """
    record_failure(error, place.error_file)
    told_by = error.told_by if isinstance(error, MegadsError) else "rank"
    first = {"rank": 0, "machine": place.local_rank, "job": place.rank}[told_by] == 0
    speaks = place.launcher_pid is None and first
    return exit_status(error), f"rank {place.rank}: {describe(error)}" if speaks else None


def end_with(launcher: int | None) -> None:
    """Have the kernel kill this process when its launcher is gone, whatever it is doing then.

    `launcher` is the local launcher's process id, None when something else started us. Works for a
    process that hangs or is stopped, too.
    """
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it was gone before
        os._exit(1)


def leave(status: int) -> NoReturn:
    """End the process now, with its output written.

    Interpreter shutdown is skipped on purpose: background threads of communication libraries that
    are still there when static objects are destroyed abort a run that had finished.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)
