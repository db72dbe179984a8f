"""What each rank is doing, in a file that shows it even after the process was killed."""

from __future__ import annotations

import faulthandler
import mmap
import os
import socket
import time
from datetime import datetime
from pathlib import Path

LINE_BYTES = 256
STEP_BYTES = 9
WHEN_BYTES = len("2026-11-30 12:00:00.000")
SINCE = b", since "
FOLDER = "ranks"
CLOCKS_S = 2.0
"""What the clock of a file system may differ by."""


def activity_file(run_dir: Path, rank: int) -> Path:
    """The file of a rank; the one of the start before it is `rank-N.previous.txt`."""
    return run_dir / FOLDER / f"rank-{rank}.txt"


class Activity:
    """One line of fixed size with the last action of this process, and under it its stacks.

    The line is shared memory on the file: writing it is no system call, and what is written stays
    when the process is killed. `since`: when the action began, by the monotonic clock. `is_own`:
    this rank itself has to do something now; it neither waits for others nor does what may take as
    long as it likes, such as starting or saving.

    A step has hundreds of actions, so each part of the line has its place, and only what changes is
    written: the step, what the action is, whose bytes are kept, and now and then when it began.
    """

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_suffix(".previous.txt"))
        self.rank, self.what, self.since, self.is_own = rank, "", 0.0, False
        self._known: dict[object, tuple[str, bytes]] = {}
        self._clocks_s = time.time() - time.monotonic()
        with path.open("w+b") as file:
            file.truncate(LINE_BYTES)
            self._line = mmap.mmap(file.fileno(), LINE_BYTES)
        self._stacks = path.open("ab", buffering=0)
        who = f"rank {rank} (process {os.getpid()} on {socket.gethostname()[:64]}), step ".encode()
        step = slice(len(who), len(who) + STEP_BYTES)
        when = slice(step.stop + len(SINCE), step.stop + len(SINCE) + WHEN_BYTES)
        self._step_at, self._when_at = step, when
        self._what_at = slice(when.stop + 2, LINE_BYTES - 1)
        self._line[:] = (who + b" " * STEP_BYTES + SINCE).ljust(LINE_BYTES - 1) + b"\n"
        self._line[when.stop : when.stop + 1] = b":"
        self.step = 0
        self.doing("starting")

    @property
    def step(self) -> int:
        """The step that is being made; 0 before the first."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._line[self._step_at] = str(number).rjust(STEP_BYTES).encode()

    def doing(self, what: str, *, is_own: bool = False) -> None:
        """The process begins something else."""
        self._do(what, self._padded(what), is_own=is_own)
        self.stamp()

    def observe(self, phase: str, where: tuple[int, ...], waits: bool) -> None:  # noqa: FBT001
        """The process enters or leaves a phase: an observer of `megads.parallel.phases`.

        The moment of it comes with the next `stamp`: of what is over before, it does not matter.
        """
        known = self._known.get((phase, where, waits))
        if known is None:
            place = f" of chunk {where[0]}, microbatch {where[1]}" if where else ""
            what = f"{'waiting in ' * waits}{phase}{place}"
            known = self._known[phase, where, waits] = what, self._padded(what)
        self._do(*known, is_own=not waits)

    def stamp(self) -> None:
        """Write when the action began."""
        when = datetime.fromtimestamp(self.since + self._clocks_s)
        self._line[self._when_at] = when.isoformat(" ", "milliseconds").encode()

    def _do(self, what: str, padded: bytes, *, is_own: bool) -> None:
        self.what, self.since, self.is_own = what, time.monotonic(), is_own
        self._line[self._what_at] = padded

    def _padded(self, what: str) -> bytes:
        room = self._what_at.stop - self._what_at.start
        return what.encode(errors="replace")[:room].ljust(room)

    def dump(self, why: str) -> None:
        """Write where every thread of this process is."""
        self.stamp()
        now = datetime.now().isoformat(" ", "milliseconds")
        self.append(f"stacks at {now}, {why}")
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def append(self, text: str) -> None:
        """Write something under the line."""
        self._stacks.write(f"\n{text}\n".encode())

    def catch_crashes(self) -> None:
        """From now on a crash of this process, as by SIGSEGV, leaves its stacks."""
        faulthandler.enable(self._stacks, all_threads=True)

    def end_after(self, seconds: float) -> None:
        """End this process, with its stacks written, unless this is called again by then.

        Works even when a thread keeps the interpreter for itself.
        """
        faulthandler.dump_traceback_later(seconds, file=self._stacks, exit=True)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def read_activity(path: Path) -> str | None:
    """The line of a rank's file; None if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(LINE_BYTES).decode(errors="replace").rstrip() or None
    except OSError:
        return None


def is_since(path: Path, when: float) -> bool:
    """Whether the file is of a process that started after `when`, in seconds since the epoch."""
    try:
        return path.stat().st_mtime > when - CLOCKS_S
    except OSError:
        return False
