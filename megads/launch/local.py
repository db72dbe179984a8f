"""Starting the workers of a job on this machine, when no launcher did."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import megads
from megads.config.schema import Config
from megads.errors import FINISHED_STATUS, STOPPED_STATUS, WorkerFailure
from megads.launch.env import exported, this_machine, worker_environment
from megads.launch.world import usable_gpus

if TYPE_CHECKING:
    from megads.launch.agent import JobEnd, WorkerEnd

RESOLVED = "--resolved-config="


def launch_local(config: Config, nproc: int, command: Sequence[str]) -> int:
    """Run `python *command` in `nproc` workers with torchrun's variables; the exit status.

    Returns 0 when all finished and 3 when they stopped for a signal after saving. Raises
    WorkerFailure for any other end: its message begins with what happened to the rank that failed
    first, and its `exit_status` is that rank's. No worker is left when this returns or raises.
    """
    machine = this_machine()
    variables = worker_environment(
        threads=config.launch.threads,
        tune_allocator=config.launch.tune_allocator,
        on_cpu=usable_gpus(config, machine) == 0,
        workers=nproc,
        cores=machine.cores,
    )
    with exported(variables), tempfile.TemporaryDirectory(prefix="megads-") as directory:
        from megads.launch.agent import run_workers

        return _status(run_workers([*_python_options(), *command], nproc, Path(directory)))


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


def _status(end: JobEnd) -> int:
    if not end.failures:
        return FINISHED_STATUS
    first = first_failure(end.failures)
    if first.status == STOPPED_STATUS:
        return STOPPED_STATUS
    if end.asked_to_stop and first.status < 0:
        raise WorkerFailure("stopped by a signal before anything could be saved")
    failure = WorkerFailure(_explain(first, end.failures))
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
