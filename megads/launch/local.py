"""Starting the workers of a job on this machine, when no launcher did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import megads
from megads.config.schema import Config
from megads.errors import FINISHED_STATUS, STOPPED_STATUS, WorkerFailure
from megads.launch.env import this_machine, with_variables, worker_environment
from megads.launch.supervisor import POLL_S, Signals, WorkerEnd, read_ends
from megads.launch.world import usable_gpus

RESOLVED = "--resolved-config="
STOPPED_EARLY = "stopped by a signal before anything could be saved"


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

    Returns 0 when all finished and 3 when they stopped for a signal after saving. Raises
    WorkerFailure for any other end: its message begins with what happened to the rank that failed
    first, and its `exit_status` is that rank's. No worker is left when this returns or raises.
    Signals to this process are passed on to the workers meanwhile, the second request to stop kills
    them; only for the main thread.
    """
    machine = this_machine()
    variables = worker_environment(
        threads=config.launch.threads,
        tune_allocator=config.launch.tune_allocator,
        on_cpu=usable_gpus(config, machine) == 0,
        workers=nproc,
        cores=machine.cores,
    )
    stops = 0
    with tempfile.TemporaryDirectory(prefix="megads-") as place, Signals().installed() as signals:
        command = [sys.executable, *_python_options(), "-m", "megads.launch.supervisor"]
        # A session of its own: Ctrl-C in a terminal reaches the workers through this process only.
        process = subprocess.Popen(
            [*command, place, str(nproc), work.target, work.preload, *arguments],
            stdin=subprocess.DEVNULL,
            env=with_variables(variables),
            start_new_session=True,
        )
        while process.poll() is None:
            for number in signals.take():
                stops += number is not signal.SIGUSR1
                if stops < 2:
                    process.send_signal(number)
                else:  # whoever asks twice does not want to wait for a checkpoint
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)
        ends = read_ends(Path(place))
    if ends is None:
        raise WorkerFailure(_unfinished(process.returncode, stops))
    return _status(ends, stops)


def _unfinished(status: int, stops: int) -> str:
    """The supervisor's own end: it was killed, or could not even start."""
    if stops:
        return STOPPED_EARLY
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed; see above"
    return f"the process that watches over the workers {how}"


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

    A worker killed by a signal that the launcher does not send (a crash, the kernel out of memory)
    comes before those that wrote an error, since their errors may be about its absence; then the
    earliest; workers that the launcher told to leave come last.
    """

    def order(end: WorkerEnd) -> tuple[int, float]:
        crashed = end.status < 0 and end.message is None
        return (2 if end.told_to_leave else 0 if crashed else 1, end.when)

    return min(ends, key=order)


def _status(failures: Sequence[WorkerEnd], stops: int) -> int:
    if not failures:
        return FINISHED_STATUS
    first = first_failure(failures)
    if first.status == STOPPED_STATUS:
        return STOPPED_STATUS
    if stops and first.status < 0:
        raise WorkerFailure(STOPPED_EARLY)
    failure = WorkerFailure(_explain(first, failures))
    failure.exit_status = first.status if first.status in (1, 2) else 1
    raise failure


def _explain(first: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
    """The first failing rank's own words, then one line on how it ended and what that took down."""
    lines = [] if first.message is None else [first.message]
    if first.status < 0:
        name = signal.Signals(-first.status).name
        reason = " (out of memory, or killed by a user)" if name == "SIGKILL" else ""
        lines.append(f"rank {first.rank} was ended by {name}{reason}")
    elif first.status != 2:
        lines.append(f"rank {first.rank} failed with exit status {first.status}")
    others = [end.rank for end in ends if end is not first and not end.told_to_leave]
    if others and first.status != 2:
        ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        lines[-1] += f"; {ranks} failed after it"
    return "\n".join(lines)


def _python_options() -> list[str]:
    """Keep files in the working directory from shadowing modules, as in an installed command.

    When megads itself is imported from the working directory, that must stay on the path.
    """
    source_tree = Path(megads.__file__).resolve().parent.parent
    here = Path(os.getcwd()).resolve()
    return [] if source_tree == here or sys.flags.safe_path else ["-P"]
