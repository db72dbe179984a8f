"""The directories of a run: looked at first; those it writes to are made once all else is valid."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megads.config.schema import Config
from megads.errors import ConfigError


def directory_problems(config: Config) -> Iterator[str]:
    """Why a directory cannot be made or written to, as far as that shows without trying."""
    for key, directory in _written(config):
        whole = directory.absolute()
        existing = next(p for p in (whole, *whole.parents) if os.path.lexists(p))
        if not existing.is_dir():
            yield f"{key}={directory}: {existing} is not a directory"
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield f"{key}={directory}: {existing} is not writable"


def load_problems(config: Config) -> Iterator[str]:
    """What is to be loaded and is not there."""
    load = config.checkpoint.load
    if load is not None and not Path(load).is_dir():
        yield f"checkpoint.load={load}: there is no such directory"


def make_directories(config: Config) -> None:
    """Create `run.dir` and the directory of state files, and see that files can be written there.

    Raises ConfigError with the system's reason.
    """
    for key, directory in _written(config):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"{key}={directory}: cannot be written: {error.strerror}") from None


def offload_directory(config: Config) -> Path:
    """Where `parallel.offload=nvme` keeps its files, which have no names there."""
    return Path(config.parallel.offload_path or config.run.dir)


def _written(config: Config) -> Iterator[tuple[str, Path]]:
    """Settings and the directories they name, as far as they are for this machine."""
    yield "run.dir", Path(config.run.dir)
    if config.launch.where == "slurm":  # the disks of the nodes are theirs
        return
    if config.parallel.offload == "nvme" and config.parallel.offload_path is not None:
        yield "parallel.offload_path", offload_directory(config)
