"""`megads-train launch=slurm`: a job that does what the command says, shown or submitted."""

from __future__ import annotations

from collections.abc import Sequence

from megads.cli.checks import check_data
from megads.config.data_files import is_text
from megads.config.directories import make_directories
from megads.config.schema import Config
from megads.launch.sbatch import job_shape
from megads.launch.submit import check_job, job_text, submit


def run_job(config: Config, arguments: Sequence[str]) -> int:
    """Check what can be checked here, then print the job's file or submit it.

    Texts are left to be tokenized in the job: machines where jobs are submitted are not for work.
    """
    shape = job_shape(config)
    check_job(config, shape)
    data = config.data
    in_container = config.launch.slurm.container_image is not None
    if not in_container and not any(map(is_text, (*data.paths, *data.valid_paths))):
        check_data(config)
    text = job_text(config, shape, arguments)
    if config.launch.submit:
        make_directories(config)
        text = submit(config, text) + "\n"
    print(text, end="")
    return 0
