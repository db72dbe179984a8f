"""Worker processes of one machine, started and watched by torch.distributed's elastic agent."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from os import kill
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
"""How long workers get to leave once one of them has failed."""
POLL_S = 0.05


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended: its exit status (negative: the signal), and what it wrote about it.

    `told_to_leave`: the launcher ended it because of another worker's failure.
    """

    rank: int
    status: int
    message: str | None = None
    when: float = 0.0
    told_to_leave: bool = False


@dataclass(frozen=True)
class JobEnd:
    """The workers that did not finish well, and whether the job had been asked to stop."""

    failures: tuple[WorkerEnd, ...]
    asked_to_stop: bool = False


class OneMachine(RendezvousHandler):
    """The rendezvous of a job on one machine: a store on a free port of the loopback interface.

    The port is taken by opening it, so two jobs can never meet in one store.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = TCPStore(
            LOOPBACK, 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def get_backend(self) -> str:
        return "one-machine"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):
    """The elastic agent, with its workers' process ids and a limit on how long their end takes."""

    pids: tuple[int, ...] = ()
    polling_since: float | None = None
    killed_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self.pids = tuple(ids.values())
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # A poll takes no time unless a worker failed and the agent waits for the others to leave.
        self.polling_since = time.monotonic()
        result: RunResult = super()._monitor_workers(worker_group)
        self.polling_since = None
        return result

    def end_overdue(self) -> None:
        """Kill workers that were asked to leave, after a failure, and have not."""
        since = self.polling_since
        if since is not None and self.killed_at is None and time.monotonic() - since > GRACE_S:
            self.killed_at = time.time()
            self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every worker that still runs."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                kill(pid, number)


class StopForwarder:
    """Passes requests to stop on to the workers; the second Ctrl-C or SIGTERM kills them.

    Ctrl-C reaches the workers as SIGTERM: they finish the step, save and leave.
    """

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []
        self.stops = 0

    @contextmanager
    def installed(self) -> Iterator[StopForwarder]:
        """Handle the signals meanwhile; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pass_on(self, agent: Agent) -> None:
        """Forward what has arrived, once there are workers."""
        while self.pending and agent.pids:
            number = self.pending.pop(0)
            if number is signal.SIGUSR1:
                agent.send(number)
                continue
            self.stops += 1
            agent.send(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(signal.Signals(number))


def run_workers(command: Sequence[str], nproc: int, directory: Path) -> JobEnd:
    """Run `python *command` in `nproc` processes until all have ended; how the job did.

    Each gets torchrun's variables. When one fails the others are told to leave and, GRACE_S later,
    killed. Signals to this process are passed on. `directory` takes the agent's files.
    """
    agent = Agent(
        WorkerSpec(
            role="worker",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=OneMachine(directory.name),
            max_restarts=0,
            monitor_interval=POLL_S,
            local_addr=LOOPBACK,
        ),
        logs_specs=DefaultLogsSpecs(log_dir=str(directory)),
        start_method="spawn",
    )
    results: list[RunResult] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(agent.run())
        except BaseException as error:
            errors.append(error)

    # Not in the main thread, where the agent would take the signals and end workers that save.
    thread = threading.Thread(target=run, name="elastic-agent")
    with _quiet(), StopForwarder().installed() as signals:
        metrics.initialize_metrics(metrics.MetricsConfig({}))
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            signals.pass_on(agent)
            agent.end_overdue()
    if errors:
        raise errors[0]
    failures = sorted(results[0].failures.items())
    ends = tuple(_end(rank, failure, agent.killed_at) for rank, failure in failures)
    return JobEnd(ends, asked_to_stop=signals.stops > 0)


def _end(rank: int, failure: Any, killed_at: float | None) -> WorkerEnd:
    """The agent's record of a failure, with what the worker wrote into its error file."""
    status, when = failure.exitcode, float(failure.timestamp)
    killed = status == -signal.SIGKILL and killed_at is not None and when >= int(killed_at)
    told = killed or status == -signal.SIGTERM
    message = failure.error_file_data.get("message", {})
    if not isinstance(message, dict):
        return WorkerEnd(rank, status, None, when, told)
    extra = message.get("extraInfo", {})
    return WorkerEnd(rank, status, extra.get("py_callstack"), float(extra.get("time", when)), told)


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs what `WorkerEnd` says better."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
