"""`TensorPiece`: a slice of a named global tensor that some rank holds.

What holds tensors (the optimizer, a model) and what stores them (a checkpoint) meet here and know
nothing of one another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


class Stored(ABC):
    """Elements that are not in memory; `dtype` is that of the opened tensor."""

    dtype: torch.dtype

    @abstractmethod
    def numel(self) -> int:
        """How many there are."""

    @abstractmethod
    def opened(self, *, write: bool) -> AbstractContextManager[Tensor]:
        """They as a flat tensor; changes are kept only with `write`."""


@dataclass
class TensorPiece:
    """`global[offset : offset + shape]` of the tensor `key`, held in `data`.

    `key` is layout-free: "param/<canonical name>", "exp_avg/<canonical name>", ... `dtype` is the
    type the tensor has on disk; `data` may have another one and is converted both ways. `data` is a
    live view (of a parameter, or of a range of a flat buffer) or something stored, with as many
    elements as `shape` in row-major order; saving reads it, loading writes into it.
    """

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor | Stored

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[Tensor]:
        """The data in the piece's shape; what is stored keeps changes only with `write`."""
        if isinstance(self.data, Tensor):
            yield self.data.view(self.shape)
        else:
            with self.data.opened(write=write) as tensor:
                yield tensor.view(self.shape)
