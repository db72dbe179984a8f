"""One rank of `megads-train`, from its arguments to the end of its process."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from megads.errors import FINISHED_STATUS, ConfigError, HangError, told_by
from megads.launch.env import Started, rank_info, started
from megads.launch.worker import end_with, failed, finished, leave

LEAVING_RUN_SHARE = 0.25
"""Of `launch.timeout_s`: how long the run that this one replaces may take to leave `run.dir`. A
file system on the network may notice only after a minute or two that a node has died."""


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

        with told_by("job"):
            config = compose(arguments)
    info = rank_info(config.launch.backend)
    assert info is not None
    check(config, info.world_size)
    make_directories(config)
    run_dir, limit_s = Path(config.run.dir), config.launch.timeout_s
    deadline = place.job_started + (config.launch.stop_after or math.inf)
    is_guest = place.launcher_pid is None  # until run_dir is ours; our own launcher has made it so
    activity = Activity(activity_file(run_dir, place.rank), place.rank, is_guest=is_guest)
    with Watchdog(activity, OWN_SHARE * limit_s, partial(_hung, place)), ExitStack() as ending:
        from megads.parallel.start import start_process_group, stop_process_group
        from megads.train.loop import train

        start_process_group(info, timeout_s=WAITING_SHARE * limit_s)
        if is_guest:
            _keep_out_others(ending, run_dir, place.rank, LEAVING_RUN_SHARE * limit_s)
            activity.take_place()
        status = train(config, info, activity, deadline)
        stop_process_group()
        activity.doing("finished" if status == FINISHED_STATUS else "stopped and saved")
    return status


def _keep_out_others(ending: ExitStack, run_dir: Path, rank: int, wait_s: float) -> None:
    """The first rank holds `run_dir` until `ending` ends; if it cannot, all raise. Collective."""
    from megads.launch.occupied import occupied
    from megads.parallel.start import all_raise

    refusal = None
    if rank == 0:
        try:
            ending.enter_context(occupied(run_dir, wait_s=wait_s))
        except ConfigError as error:
            refusal = error
    with told_by("job"):
        all_raise(refusal)


def _hung(place: Started, doing: str) -> NoReturn:
    """From the watchdog's thread: this rank hangs."""
    leave(_failed(place, HangError(doing)))


def _failed(place: Started, error: BaseException) -> int:
    status, text = failed(place, error)
    if text is not None:
        print(f"megads-train: {text}", file=sys.stderr)
    return status
