"""What is looked at before any worker starts."""

from __future__ import annotations

from pathlib import Path

from megads.checkpoint.directory import committed_steps
from megads.config.schema import Config
from megads.data.prepare import prepare_data
from megads.data.source import check_sources


def check_data(config: Config) -> None:
    """Tokenize the texts that are not yet. Raises DataError for too little data, or none."""
    saved = committed_steps(Path(config.run.dir, "checkpoints"))
    is_new = not saved and config.checkpoint.load is None
    check_sources(config, prepare_data(config), is_new=is_new)
