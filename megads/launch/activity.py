"""What each rank is doing, in a file that shows it even after the process was killed."""

from __future__ import annotations

import faulthandler
import mmap
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megads.errors import ConfigError

LINE_BYTES = 256
FOLDER = "ranks"
CLOCKS_S = 2.0
"""What the clock of a file system may differ by."""


def activity_file(run_dir: Path, rank: int) -> Path:
    """The file of a rank; the one of the start before it is `rank-N.previous.txt`."""
    return run_dir / FOLDER / f"rank-{rank}.txt"


class Doing(Protocol):
    """Something that knows what this process is doing, as `megads.parallel.phases` does."""

    @property
    def current(self) -> tuple[str, tuple[int, ...], bool]:
        """The phase, its (chunk, microbatch) or nothing, and whether it waits for others."""

    changed_s: float


class Activity:
    """One line of fixed size with the last action of this process, and under it its stacks.

    The line is shared memory on the file: writing it is no system call, and what is written stays
    when the process is killed. `since`: when the action began, by the monotonic clock. `is_own`:
    this rank itself has to do something now; it neither waits for others nor does what may take as
    long as it likes, such as starting or saving.

    A step has hundreds of actions. Telling of each would slow it down, so what is done in training
    is looked up by a thread now and then, and when something happens. Raises ConfigError when the
    file cannot be made. With `is_guest` another process may have the file: `rank-N.starting.txt` is
    written until `take_place`.
    """

    def __init__(self, path: Path, rank: int, *, is_guest: bool = False) -> None:
        self.rank, self.step = rank, 0
        self._path = path
        self.what, self.since, self.is_own = "", 0.0, False
        self._followed: Doing | None = None
        self._clocks_s = time.time() - time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not is_guest:
                _make_room(path)
            self._open(_guest_file(path) if is_guest else path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        self._who = f"rank {rank} (process {os.getpid()} on {socket.gethostname()[:64]})"
        self.doing("starting")

    def _open(self, path: Path) -> None:
        # Written, not only sized: who writes to memory on a file that has no room is killed.
        path.write_bytes(b" " * LINE_BYTES)
        with path.open("r+b") as file:
            self._line = mmap.mmap(file.fileno(), LINE_BYTES)
        self._stacks = path.open("ab", buffering=0)

    def take_place(self) -> None:
        """Stop being a guest: nobody else has the file."""
        _make_room(self._path)
        _guest_file(self._path).replace(self._path)

    def doing(self, what: str) -> None:
        """The process does this, and nobody minds how long it takes."""
        self._followed = None
        self.what, self.since, self.is_own = what, time.monotonic(), False
        self._write()

    def follow(self, doing: Doing) -> None:
        """From now on the process does what `doing` says."""
        self._followed, self._follows_since = doing, time.monotonic()

    def stay(self) -> None:
        """An error has come: what was done last stays, and may take as long as it likes."""
        self.refresh()
        self._followed, self.is_own = None, False

    def refresh(self) -> None:
        """Bring the line up to date."""
        followed = self._followed
        if followed is not None:
            name, where, waits = followed.current
            place = f" of chunk {where[0]}, microbatch {where[1]}" if where else ""
            self.what, self.is_own = f"{'waiting in ' * waits}{name}{place}", not waits
            self.since = max(followed.changed_s, self._follows_since)
        self._write()

    def _write(self) -> None:
        when = datetime.fromtimestamp(self.since + self._clocks_s).isoformat(" ", "milliseconds")
        text = f"{self._who}, step {self.step}, since {when}: {self.what}"
        self._line[:] = (
            text.encode(errors="replace")[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"
        )

    def dump(self, why: str) -> None:
        """Write where every thread of this process is."""
        self.refresh()
        now = datetime.now().isoformat(" ", "milliseconds")
        self.append(f"stacks at {now}, {why}")
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def append(self, text: str) -> None:
        """Write something under the line, if the disk has room for it."""
        with suppress(OSError):
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


def _guest_file(path: Path) -> Path:
    return path.with_suffix(".starting.txt")


def _make_room(path: Path) -> None:
    """Keep the file of the start before this one beside it."""
    if path.exists():
        path.replace(path.with_suffix(".previous.txt"))


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
