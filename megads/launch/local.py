"""Starting the workers of a job on this machine, when no launcher did."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import megads
from megads.config.schema import Config
from megads.errors import FINISHED_STATUS, STOPPED_STATUS, WorkerFailure
from megads.launch.activity import activity_file, is_since, read_activity
from megads.launch.env import this_machine, with_variables, worker_environment
from megads.launch.supervisor import POLL_S, Signals, WorkerEnd, blocked, read_ends, request
from megads.launch.watchdog import GRACE_S, LEAVING_SHARE
from megads.launch.world import usable_gpus

_log = logging.getLogger(__name__)
RESOLVED = "--resolved-config="
KILLED = "killed by the second Ctrl-C; what was saved before is there"


@dataclass(frozen=True)
class Work:
    """What workers do: `target` ("module:function") is called with the arguments of the job.

    `preload` names the module whose import takes long; it is imported once, before the workers
    part.
    """

    target: str
    preload: str


def launch_local(config: Config, nproc: int, work: Work, arguments: Sequence[str]) -> int:
    """Do `work` in `nproc` workers with torchrun's variables; the exit status.

    Returns 0 when all finished and 3 when they stopped for a signal after saving. A job that fails
    is started again `launch.max_restarts` times, unless it says that this would not help. Raises
    WorkerFailure for any other end: its message begins with what happened to the rank that failed
    first, and its `exit_status` is that rank's. No worker is left when this returns or raises.
    Signals to this process are passed on to the workers meanwhile: any number of requests to stop
    let them save, the second Ctrl-C kills them; only for the main thread.
    """
    machine = this_machine()
    variables = worker_environment(
        threads=config.launch.threads,
        tune_allocator=config.launch.tune_allocator,
        on_cpu=usable_gpus(config, machine) == 0,
        workers=nproc,
        cores=machine.cores,
    )
    grace_s = min(GRACE_S, LEAVING_SHARE * config.launch.timeout_s)
    command = [str(nproc), str(grace_s), work.target, work.preload, *arguments]
    job = _Job(Path(config.run.dir), nproc, command, variables)
    with Signals().installed() as signals:
        for restarts_left in range(config.launch.max_restarts, -1, -1):
            try:
                return job.run(signals)
            except _Failure as failure:
                if not restarts_left or failure.is_final or job.asked_to_stop:
                    raise
                _log.warning(
                    "%s\nstarting again from the newest checkpoint, restart %d of %d",
                    failure,
                    config.launch.max_restarts - restarts_left + 1,
                    config.launch.max_restarts,
                )
    raise AssertionError("the last round returns or raises")


class _Failure(WorkerFailure):
    """`is_final`: the same would happen again."""

    is_final = False


@dataclass
class _Job:
    """The processes of a job, started once or more often.

    `command`: the supervisor's arguments but the first.
    """

    run_dir: Path
    nproc: int
    command: Sequence[str]
    variables: dict[str, str]
    interrupts: int = 0
    asked_to_stop: bool = False
    started: float = 0.0

    def run(self, signals: Signals) -> int:
        """Start the workers and wait for their end."""
        self.started = time.time()
        with tempfile.TemporaryDirectory(prefix="megads-") as place:
            command = [sys.executable, *_python_options(), "-m", "megads.launch.supervisor"]
            # The supervisor inherits what is blocked: signals wait until it has handlers for them.
            with blocked():
                # A session of its own: Ctrl-C in a terminal reaches the workers only through us.
                process = subprocess.Popen(
                    [*command, place, *self.command],
                    stdin=subprocess.DEVNULL,
                    env=with_variables(self.variables),
                    start_new_session=True,
                )
            while process.poll() is None:
                for number in signals.take():
                    self._pass_on(number, process)
                time.sleep(POLL_S)
            ends = read_ends(Path(place))
        if ends is None:
            with suppress(ProcessLookupError):  # all workers were gone before
                os.killpg(process.pid, signal.SIGKILL)
            raise _Failure(self._unfinished(process.returncode))
        return self._status(ends)

    def _pass_on(self, number: signal.Signals, process: subprocess.Popen[bytes]) -> None:
        self.asked_to_stop = True
        self.interrupts += number is signal.SIGINT
        if self.interrupts < 2:
            process.send_signal(request(number))
        else:  # who presses Ctrl-C twice does not want to wait for a checkpoint
            os.killpg(process.pid, signal.SIGKILL)

    def _unfinished(self, status: int) -> str:
        """The supervisor's own end: it was killed, or could not even start."""
        if self.interrupts >= 2:
            return KILLED
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed; see above"
        return self._kept(f"the process that watches over the workers {how}")

    def _status(self, failures: Sequence[WorkerEnd]) -> int:
        if not failures:
            return FINISHED_STATUS
        first = first_failure(failures)
        if first.status == STOPPED_STATUS:
            return STOPPED_STATUS
        text, refused = _explain(first, failures), _refused(first)
        failure = _Failure(text if refused else self._kept(text))
        failure.exit_status = 2 if refused else 1
        failure.is_final = first.final or refused
        raise failure

    def _kept(self, text: str) -> str:
        """The failure as it is told: with the last action of each rank, and where it is all kept.

        Another start of the run writes over the files of the ranks, so they are moved away.
        """
        files = [activity_file(self.run_dir, rank) for rank in range(self.nproc)]
        lines = [read_activity(file) for file in files if is_since(file, self.started)]
        if not lines:
            return text
        kept = self.run_dir / "failures" / datetime.now().strftime("%Y-%m-%d-%H%M%S-%f")
        text = "\n".join([text, f"what the ranks did last (stacks in {kept}):", *map(str, lines)])
        try:
            kept.parent.mkdir(exist_ok=True)
            files[0].parent.rename(kept)
            (kept / "failure.txt").write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:  # of a full disk, say; the failure itself matters more
            text += f"\n(not kept: {error})"
        return text


@contextmanager
def handed_over(config: Config) -> Iterator[list[str]]:
    """Arguments that give workers the resolved configuration, by a file that lasts meanwhile."""
    with tempfile.TemporaryDirectory(prefix="megads-") as directory:
        path = Path(directory, "config.json")
        path.write_text(config.model_dump_json())
        yield [f"{RESOLVED}{path}"]


def received(arguments: Sequence[str]) -> Config | None:
    """The configuration given by `handed_over`; None when the arguments are a user's."""
    if len(arguments) != 1 or not arguments[0].startswith(RESOLVED):
        return None
    return Config.model_validate_json(Path(arguments[0].removeprefix(RESOLVED)).read_text())


def first_failure(ends: Sequence[WorkerEnd]) -> WorkerEnd:
    """The worker whose end made the others fail.

    A worker that just vanished (killed by a signal that the launcher does not send, as in a crash,
    or gone too early without an error) comes before those that wrote one, since theirs may be about
    its absence; then the earliest; workers that the launcher told to leave come last.
    """

    def order(end: WorkerEnd) -> tuple[int, float]:
        silent = end.message is None and end.status != STOPPED_STATUS
        vanished = silent or end.status == 0
        return (2 if end.told_to_leave else 0 if vanished else 1, end.when)

    return min(ends, key=order)


def _refused(end: WorkerEnd) -> bool:
    """Whether the worker says that what it was told to do cannot be done."""
    return end.status == 2 and end.message is not None


def _explain(first: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
    """The first failing rank's own words, then one line on how it ended and what that took down."""
    lines = [] if first.message is None else [first.message]
    if first.status < 0:
        name = signal.Signals(-first.status).name
        reason = " (out of memory, or killed by a user)" if name == "SIGKILL" else ""
        lines.append(f"rank {first.rank} was ended by {name}{reason}")
    elif not _refused(first):
        silent = "" if lines else " and did not say why"
        lines.append(f"rank {first.rank} failed with exit status {first.status}{silent}")
    others = [end for end in ends if end is not first]
    failed = [end.rank for end in others if not end.told_to_leave]
    stayed = [end.rank for end in others if end.told_to_leave and end.status == -signal.SIGKILL]
    if failed and not _refused(first):
        lines[-1] += f"; {_ranks(failed)} failed after it"
    if stayed and not _refused(first):
        lines[-1] += f"; {_ranks(stayed)} did not leave when told to, and had to be killed"
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks by number, a few of many."""
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {few}{more}"


def _python_options() -> list[str]:
    """Keep files in the working directory from shadowing modules, as in an installed command.

    When megads itself is imported from the working directory, that must stay on the path.
    """
    source_tree = Path(megads.__file__).resolve().parent.parent
    here = Path(os.getcwd()).resolve()
    return [] if source_tree == here or sys.flags.safe_path else ["-P"]
