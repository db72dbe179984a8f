"""Where the files written by other systems are, when they are there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "shared" / "cases"


def case(relative: str) -> Path:
    path = ROOT / relative
    if not path.exists():
        pytest.skip(f"needs the reference files in {ROOT}")
    return path
