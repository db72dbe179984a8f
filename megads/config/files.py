"""Files that are shipped with megads."""

from __future__ import annotations

from pathlib import Path

import megads
from megads.errors import ConfigError

PRIMARY = "train"


def config_dir() -> Path:
    """Where the YAML groups are: inside the installed package, or beside it in a checkout."""
    package = Path(megads.__file__).parent.absolute()
    for directory in (package / "configs", package.parent / "configs"):
        if (directory / f"{PRIMARY}.yaml").is_file():
            return directory
    raise ConfigError(f"the configs directory is missing from the installation at {package}")
