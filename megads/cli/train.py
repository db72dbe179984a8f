"""`megads-train`: compose the configuration, then start workers or be one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megads.config.schema import Config
from megads.config.validate import check, make_run_dir
from megads.errors import ConfigError, DataError, MegadsError
from megads.launch.env import Started, rank_info, started, this_machine
from megads.launch.local import handed_over, launch_local, received
from megads.launch.signals import StopRequest
from megads.launch.worker import describe, end_with, exit_status, leave, record_failure
from megads.launch.world import check_fits, local_layout


def main() -> None:
    """The command. Exit status: 0 done, 2 bad configuration, 3 stopped and saved, 1 otherwise."""
    place = started()
    if place is None:
        from megads.config.compose import run_with_hydra

        sys.exit(run_with_hydra(_launch))
    with StopRequest():
        end_with(place.launcher_pid)
        leave(_work(place, sys.argv[1:]))


def _launch(config: Config) -> int:
    """Check everything that can be checked without starting anything, then run the workers."""
    try:
        machine = this_machine()
        layout = local_layout(config, machine)
        check(config, layout.world_size)
        check_fits(config, layout, machine, sys.argv[1:])
        make_run_dir(config)
        with handed_over(config) as arguments:
            return launch_local(config, layout.world_size, ["-m", "megads.cli.train", *arguments])
    except MegadsError as error:
        print(f"megads-train: {error}", file=sys.stderr)
        return error.exit_status


def _work(place: Started, arguments: Sequence[str]) -> int:
    """One rank's run, from its configuration to its exit status."""
    try:
        return _train(arguments)
    except BaseException as error:
        record_failure(error, place.error_file)
        if place.launcher_pid is None and _speaks(place, error):
            print(f"megads-train: rank {place.rank}: {describe(error)}", file=sys.stderr)
        return exit_status(error)


def _train(arguments: Sequence[str]) -> int:
    config = received(arguments)
    if config is None:
        from megads.config.compose import compose

        config = compose(arguments)
    info = rank_info(config.launch.backend)
    assert info is not None
    check(config, info.world_size)
    make_run_dir(config)
    from megads.parallel.start import start_process_group, stop_process_group
    from megads.train.loop import train

    start_process_group(
        rank=info.rank,
        world_size=info.world_size,
        backend=info.backend,
        init_method=info.init_method,
        device=info.device,
        timeout_s=config.launch.timeout_s,
    )
    status = train(config, info)
    stop_process_group()
    return status


def _speaks(place: Started, error: BaseException) -> bool:
    """A fault of the configuration is the same on all ranks; files differ between machines."""
    if isinstance(error, ConfigError):
        return place.rank == 0 or (isinstance(error, DataError) and place.local_rank == 0)
    return True


if __name__ == "__main__":
    main()
