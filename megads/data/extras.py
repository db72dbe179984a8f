"""The packages of `megads[data]`, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from megads.errors import DataError


def load_extra(package: str, user: object) -> Any:
    """Import a package that `user`, a file or a setting, cannot do without.

    Raises DataError that says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing_extra(package, user) from error


def missing_extra(package: str, user: object) -> DataError:
    """The error for a package that is not installed."""
    return DataError(f"{user} needs the package {package}: pip install 'megads[data]'")
