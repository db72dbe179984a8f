"""Ids in little room."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
"""The ids of one text, `[tokens]`."""


def packed(ids: Sequence[int]) -> Ids:
    """A list of ids as an array. Raises OverflowError for one that int32 cannot hold."""
    return np.frombuffer(array("i", ids), dtype=np.int32)  # twice as fast as np.array
