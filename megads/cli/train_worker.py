"""One rank of `megads-train`, from its arguments to the end of its process."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from megads.errors import FINISHED_STATUS, HangError
from megads.launch.env import Started, rank_info, started
from megads.launch.worker import end_with, failed, finished, leave


def work(arguments: Sequence[str]) -> NoReturn:
    """Be a worker. The arguments are a user's, or those of `megads.launch.local.handed_over`."""
    place = started()
    assert place is not None
    end_with(place.launcher_pid)
    try:
        status = _train(arguments, place)
        finished(place)
    except BaseException as error:
        status = _failed(place, error)
    leave(status)


def _train(arguments: Sequence[str], place: Started) -> int:
    """This rank's run; its exit status."""
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
    deadline = place.job_started + (config.launch.stop_after or math.inf)
    with Watchdog(activity, OWN_SHARE * limit_s, partial(_hung, place)):
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


def _failed(place: Started, error: BaseException) -> int:
    status, text = failed(place, error)
    if text is not None:
        print(f"megads-train: {text}", file=sys.stderr)
    return status
