"""`megads-train`: compose the configuration, then start workers or be one of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megads.cli.command import INTERRUPTED_STATUS
from megads.cli.train_worker import work
from megads.errors import ConfigError, MegadsError
from megads.launch.env import started, this_machine
from megads.launch.signals import StopRequest

if TYPE_CHECKING:
    from megads.config.schema import Config


def main() -> None:
    """The command. Exit status: 0 done, 2 bad configuration, 3 stopped and saved, 130 interrupted
    before there were workers, 1 otherwise."""
    place = started()
    if place is None:
        try:
            from megads.config.compose import run_with_hydra

            sys.exit(run_with_hydra(_launch))
        except MegadsError as error:
            print(f"megads-train: {error}", file=sys.stderr)
            sys.exit(error.exit_status)
        except KeyboardInterrupt:  # before there were workers to tell
            sys.exit(INTERRUPTED_STATUS)
    with StopRequest():  # Before the slow imports: until it is there, a signal ends the process.
        work(sys.argv[1:])


def _launch(config: Config, arguments: Sequence[str]) -> int:
    """Check and prepare everything that needs no worker, then run the workers."""
    if config.launch.where == "slurm":
        from megads.cli.job import run_job

        return run_job(config, arguments)
    from megads.launch.sbatch import FOR_THE_SUBMISSION

    if unread := [word for word in arguments if word.startswith(FOR_THE_SUBMISSION)]:
        raise ConfigError(f"{', '.join(unread)}: only read with launch=slurm, which is not given")
    from megads.cli.checks import check_data
    from megads.config.directories import make_directories
    from megads.config.validate import check
    from megads.launch.local import Work, handed_over, launch_local
    from megads.launch.occupied import occupied
    from megads.launch.world import check_disk, check_fits, local_layout

    machine = this_machine()
    layout = local_layout(config, machine)
    check(config, layout.world_size)
    check_fits(config, layout, machine, arguments)
    make_directories(config)
    check_disk(config, layout)
    logging.basicConfig(format="megads-train: %(message)s")
    logging.getLogger("megads.data").setLevel(logging.INFO)
    with occupied(Path(config.run.dir)), handed_over(config) as words:
        check_data(config)
        workers = Work("megads.cli.train_worker:work", preload="megads.train.loop")
        return launch_local(config, layout.world_size, workers, words)


if __name__ == "__main__":
    main()
