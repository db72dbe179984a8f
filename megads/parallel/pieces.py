"""`TensorPiece`: a slice of a named global tensor that some rank holds.

What holds tensors (the optimizer, a model) and what stores them (a checkpoint) meet here and know
nothing of one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class TensorPiece:
    """`global[offset : offset + shape]` of the tensor `key`, held in `data`.

    `key` is layout-free: "param/<canonical name>", "exp_avg/<canonical name>", ... `dtype` is the
    type the tensor has on disk; `data` may have another one and is converted both ways. `data` is a
    live view (of a parameter, or of a range of a flat buffer) with as many elements as `shape` in
    row-major order; saving reads it, loading writes into it.
    """

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self) -> Tensor:
        """`data` in the piece's shape, sharing its memory."""
        return self.data if self.data.shape == self.shape else self.data.view(self.shape)
