"""The workers of a job on one machine: forked from one process that has imported everything.

`megads-train` starts this program, which imports what a worker needs once, forks the workers,
passes signals on to them, ends all when one fails, and reports how each ended. Forking makes the
start of a job as quick for eight workers as for one, and they share the memory of the imported
libraries. It is safe because nothing here uses a GPU or starts a thread before the last fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megads.launch.env import become_worker, launcher_pid
from megads.launch.signals import StopRequest
from megads.launch.worker import end_file, end_with, leave

LOOPBACK = "127.0.0.1"
POLL_S = 0.02
END = "end.json"
UNFINISHED = "the process ended, with status 0, before the run was finished"
STOPPED = "the process was stopped, as by kill -STOP, and the others waited for it in vain"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Entry = Callable[[Sequence[str]], None]
"""What a worker does, with the arguments of the job; it ends the process."""


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended: its exit status (negative: the signal), and what it wrote about it.

    `told_to_leave`: it was ended because of another worker's failure. `final`: what it says would
    be the same if the job was started again.
    """

    rank: int
    status: int
    message: str | None = None
    when: float = 0.0
    told_to_leave: bool = False
    final: bool = False


def request(number: signal.Signals) -> signal.Signals:
    """What workers get for a signal: SIGUSR1 as it is, SIGTERM for any other request to stop."""
    return number if number is signal.SIGUSR1 else signal.SIGTERM


def read_ends(directory: Path) -> list[WorkerEnd] | None:
    """The workers that ended badly, in rank order; None if the supervisor itself did."""
    file = directory / END
    if not file.is_file():
        return None
    return [WorkerEnd(**end) for end in json.loads(file.read_text())]


@dataclass
class Workers:
    """The running workers: their process ids by rank, and how those that are gone ended."""

    directory: Path
    grace_s: float
    """How long the others get to leave once one has failed."""
    running: dict[int, int] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    """Workers that were stopped and had not gone on when the first failed, if any has."""
    ends: list[WorkerEnd] = field(default_factory=list)
    leave_by: float | None = None
    """When those that were told to leave are killed."""
    killed: bool = False

    def fork(self, entry: Entry, arguments: Sequence[str], nproc: int) -> None:
        """Start `nproc` workers that meet in a store of this process, on a free port.

        The port is taken by listening on it, so two jobs can never meet in one store.
        """
        listener = socket.create_server((LOOPBACK, 0), backlog=nproc)
        port, mine = listener.getsockname()[1], os.getpid()
        gc.freeze()  # a collection in a worker would touch, and so copy, all that is shared
        for rank in range(nproc):
            with warnings.catch_warnings():  # about the idle threads of numerical libraries
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                listener.close()
                become_worker(rank, nproc, LOOPBACK, port, self.error_file(rank), mine)
                _work(entry, arguments)
            self.running[rank] = pid
        if nproc == 1:
            listener.close()
            return
        from torch.distributed import TCPStore

        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def error_file(self, rank: int) -> Path:
        """Where a worker describes its failure."""
        return self.directory / f"error-{rank}.json"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every worker that still runs."""
        for pid in self.running.values():
            os.kill(pid, number)

    def collect(self) -> None:
        """Take note of workers that have ended; the first failure tells the others to leave."""
        for rank, pid in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not done or self._goes_on(rank, status):
                continue
            del self.running[rank]
            end = self._end(rank, os.waitstatus_to_exitcode(status))
            if end is not None:
                self.ends.append(end)
        if self.ends and self.leave_by is None:
            self.leave_by = time.monotonic() + self.grace_s
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)  # who is stopped cannot leave
        elif self.leave_by is not None and not self.killed and time.monotonic() > self.leave_by:
            self.killed = True
            self.send(signal.SIGKILL)

    def _goes_on(self, rank: int, status: int) -> bool:
        """Whether the worker has not ended, but was stopped or continued."""
        if os.WIFSTOPPED(status):
            self.stopped.add(rank)
        elif os.WIFCONTINUED(status):
            if self.leave_by is None:
                self.stopped.discard(rank)
        else:
            return False
        return True

    def _end(self, rank: int, status: int) -> WorkerEnd | None:
        if self.leave_by is not None and rank in self.stopped:
            # Without a time, it comes before the errors of those that waited.
            return WorkerEnd(rank, status, STOPPED)
        file = self.error_file(rank)
        if status == 0:
            return None if end_file(file).exists() else WorkerEnd(rank, 0, UNFINISHED, time.time())
        told = self.leave_by is not None and status == -signal.SIGTERM
        told |= self.killed and status == -signal.SIGKILL
        if not file.is_file():
            return WorkerEnd(rank, status, None, time.time(), told)
        extra = json.loads(file.read_text())["message"]["extraInfo"]
        when, final = float(extra["time"]), bool(extra["final"])
        return WorkerEnd(rank, status, extra["py_callstack"], when, told, final)


class Signals:
    """Remembers the signals that arrive while it is installed, in their order."""

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []

    @contextmanager
    def installed(self) -> Iterator[Signals]:
        """Handle HANDLED meanwhile. Only in the main thread.

        A hangup that is ignored, as under nohup, stays ignored.
        """
        spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        handled = [number for number in HANDLED if number not in spared]
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def take(self) -> list[signal.Signals]:
        """What has arrived since the last call."""
        taken, self.pending = self.pending, []
        return taken

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(signal.Signals(number))


@contextmanager
def blocked() -> Iterator[None]:
    """Signals that are handled wait meanwhile, also for processes that are started in it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def supervise(
    entry: Entry, arguments: Sequence[str], nproc: int, workers: Workers, signals: Signals
) -> list[WorkerEnd]:
    """Run `entry(arguments)` in `nproc` forked workers until all have ended; the bad ends.

    Each gets torchrun's variables. When one fails the others are told to leave and, a little later,
    killed. `signals`, already installed, are passed on: a worker finishes its step and saves.
    """
    # A signal must find either the workers listed here or, in a worker, its own handlers.
    with blocked():
        workers.fork(entry, arguments, nproc)
    while workers.running:
        for number in signals.take():
            workers.send(request(number))
        workers.collect()
        time.sleep(POLL_S)
    return sorted(workers.ends, key=lambda end: end.rank)


def _work(entry: Entry, arguments: Sequence[str]) -> NoReturn:
    """The life of a worker after the fork."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            entry(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(1)


def main() -> None:
    """The program: `DIRECTORY NPROC GRACE_S MODULE:FUNCTION PRELOADED_MODULE [ARGUMENT...]`.

    The workers' error files and, as END, the end of the job are written to `DIRECTORY`.
    """
    place, nproc, grace_s, target, preloaded, *arguments = sys.argv[1:]
    directory = Path(place)
    end_with(launcher_pid())
    with Signals().installed() as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # the launcher had them blocked
        module, function = target.split(":")
        with suppress(Exception):  # a worker that lacks a module says so better
            importlib.import_module(preloaded)
        entry = getattr(importlib.import_module(module), function)
        workers = Workers(directory, float(grace_s))
        ends = supervise(entry, arguments, int(nproc), workers, signals)
        temporary = directory / f"{END}.part"
        temporary.write_text(json.dumps([asdict(end) for end in ends]))
        temporary.replace(directory / END)


if __name__ == "__main__":
    main()
