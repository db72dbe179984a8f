"""`megads-train`: compose the configuration, then start workers or be one of them."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megads.errors import FINISHED_STATUS, HangError, MegadsError
from megads.launch.env import Started, rank_info, started, this_machine
from megads.launch.signals import StopRequest
from megads.launch.worker import end_with, failed, finished, leave

if TYPE_CHECKING:
    from megads.config.schema import Config


def main() -> None:
    """The command. Exit status: 0 done, 2 bad configuration, 3 stopped and saved, 1 otherwise."""
    place = started()
    if place is None:
        try:
            from megads.config.compose import run_with_hydra

            sys.exit(run_with_hydra(_launch))
        except MegadsError as error:
            print(f"megads-train: {error}", file=sys.stderr)
            sys.exit(error.exit_status)
        except KeyboardInterrupt:  # before there were workers to tell
            sys.exit(130)
    with StopRequest():  # Before the slow imports: until it is there, a signal ends the process.
        work(sys.argv[1:])


def work(arguments: Sequence[str]) -> NoReturn:
    """Be a worker, from its arguments to the end of its process."""
    place = started()
    assert place is not None
    end_with(place.launcher_pid)
    try:
        status = _train(arguments, place)
        finished(place)
    except BaseException as error:
        status = _failed(place, error)
    leave(status)


def _failed(place: Started, error: BaseException) -> int:
    status, text = failed(place, error)
    if text is not None:
        print(f"megads-train: {text}", file=sys.stderr)
    return status


def _launch(config: Config, arguments: Sequence[str]) -> int:
    """Check and prepare everything that needs no worker, then run the workers."""
    if config.launch.where == "slurm":
        from megads.cli.job import run_job

        return run_job(config, arguments)
    from megads.cli.checks import check_data
    from megads.config.directories import make_directories
    from megads.config.validate import check
    from megads.launch.local import Work, handed_over, launch_local
    from megads.launch.world import check_disk, check_fits, local_layout

    machine = this_machine()
    layout = local_layout(config, machine)
    check(config, layout.world_size)
    check_fits(config, layout, machine, arguments)
    make_directories(config)
    check_disk(config, layout)
    logging.basicConfig(format="megads-train: %(message)s")
    logging.getLogger("megads.data").setLevel(logging.INFO)
    check_data(config)
    with handed_over(config) as words:
        work = Work("megads.cli.train:work", preload="megads.train.loop")
        return launch_local(config, layout.world_size, work, words)


def _train(arguments: Sequence[str], place: Started) -> int:
    """One rank's run, from its configuration to its exit status."""
    from megads.config.directories import make_directories
    from megads.config.validate import check
    from megads.launch.activity import Activity, activity_file
    from megads.launch.local import received
    from megads.launch.watchdog import OWN_SHARE, WAITING_SHARE, Watchdog

    config = received(arguments)
    if config is None:
        from megads.config.compose import compose

        config = compose(arguments)
    info = rank_info(config.launch.backend)
    assert info is not None
    check(config, info.world_size)
    make_directories(config)
    activity = Activity(activity_file(Path(config.run.dir), place.rank), place.rank)
    limit_s = config.launch.timeout_s
    hung = partial(_hung, place)
    deadline = place.job_started + (config.launch.stop_after or math.inf)
    with Watchdog(activity, OWN_SHARE * limit_s, hung):
        from megads.parallel.start import start_process_group, stop_process_group
        from megads.train.loop import train

        start_process_group(info, timeout_s=WAITING_SHARE * limit_s)
        status = train(config, info, activity, deadline)
        stop_process_group()
        activity.doing("finished" if status == FINISHED_STATUS else "stopped and saved")
    return status


def _hung(place: Started, doing: str) -> NoReturn:
    """From the watchdog's thread: this rank hangs."""
    leave(_failed(place, HangError(doing)))


if __name__ == "__main__":
    main()
