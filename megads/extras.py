"""The packages that only some uses need, imported where they are needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from megads.errors import DataError

_EXTRAS = {
    "datasets": "data",
    "lm_eval": "eval",
    "plotly": "report",
    "pyarrow": "data",
    "tensorboard": "logging",
    "tiktoken": "data",
    "wandb": "logging",
    "zstandard": "data",
}
"""Which optional dependencies of megads bring a package."""


def load_extra(package: str, user: object) -> Any:
    """Import a package that `user`, a file, a setting or a command, cannot do without.

    Raises DataError that says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing_extra(package, user) from error


def missing_extra(package: str, user: object) -> DataError:
    """The error for a package that is not installed."""
    name = package.partition(".")[0]
    return DataError(f"{user} needs the package {name}: pip install 'megads[{_EXTRAS[name]}]'")


def is_installed(package: str) -> bool:
    """Whether a package can be imported, as far as that shows without trying.

    A directory of its name where the command was started is not the package, though Python would
    import it.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
