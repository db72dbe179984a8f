"""Handing a job to SLURM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.config.data_files import data_problems
from megads.config.directories import directory_problems, load_problems
from megads.config.loggers import missing_packages
from megads.config.schema import Config
from megads.config.validate import validate
from megads.errors import ConfigError
from megads.launch.sbatch import JobShape, render

FILE = "job.sbatch"


def check_job(config: Config, shape: JobShape) -> None:
    """Raise ConfigError for what shows before the job runs.

    What only the nodes have, memory and GPUs, does not. Where a container shows other files than
    there are here, neither files nor packages are looked for.
    """
    problems = validate(config, shape.world_size)
    if config.launch.slurm.container_image is not None:
        elsewhere = {*data_problems(config), *directory_problems(config)}
        elsewhere |= {*load_problems(config), *missing_packages(config)}
        problems = [problem for problem in problems if problem not in elsewhere]
    if config.launch.submit and shutil.which("sbatch") is None:
        problems.append(
            "launch.where=slurm: sbatch is not on the PATH; start this where jobs are submitted, "
            "or see the file with launch.submit=false"
        )
    if problems:
        raise ConfigError(problems)


def job_text(config: Config, shape: JobShape, arguments: Sequence[str]) -> str:
    """The sbatch file for this command with these arguments, run by this Python."""
    programs = Path(sys.executable).parent
    has_command = (programs / "megads-train").exists()
    return render(config, shape, arguments, programs if has_command else None)


def submit(config: Config, text: str) -> str:
    """Write the file into `run.dir`, which exists, and submit it; what to tell the user.

    Raises ConfigError with what sbatch says when it refuses the job.
    """
    file = Path(config.run.dir, FILE)
    file.write_text(text)
    command = ["sbatch", "--parsable", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refused {file}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]  # with several clusters, its name follows
    return f"submitted {file} as job {job}; what it says goes to {file.parent}/slurm-{job}.out"
