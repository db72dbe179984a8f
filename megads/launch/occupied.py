"""One run at a time in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megads.errors import ConfigError

LOCK = ".lock"
"""File in `run.dir` that is locked while a run goes on; it says whose it is."""
OWNER_BYTES = 100
POLL_S = 0.2


@contextmanager
def occupied(run_dir: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other runs out of `run_dir` meanwhile; however this process ends, they may come in.

    `wait_s`: how long to wait for one that may just be leaving. Raises ConfigError if it stays, or
    if the file cannot be opened. A file system without locks keeps nobody out.
    """
    path = run_dir / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:  # another user's, say
        raise ConfigError(f"run.dir={run_dir}: {path}: {error.strerror}") from error
    try:
        deadline = time.monotonic() + wait_s
        while not _locked(file):
            if time.monotonic() >= deadline:
                owner = os.pread(file, OWNER_BYTES, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"run.dir={run_dir}: {owner or 'another process'} is training there; let it "
                    "end, or choose another run.dir"
                )
            time.sleep(POLL_S)
        with suppress(OSError):  # of a full disk
            owner = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(file, owner.encode()[:OWNER_BYTES].ljust(OWNER_BYTES), 0)
        yield
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    """Whether the lock is ours, or there is none to be had."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none
        return True
    return True
