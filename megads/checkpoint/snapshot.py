"""Copies of pieces in host memory, so that training may go on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megads.parallel.pieces import TensorPiece

_ALIGNMENT = 64


class HostCopies:
    """One buffer of host memory, pinned if a GPU's is copied, kept from one save to the next.

    It holds as many bytes as the pieces of one save have; a save of other sizes gets another one.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def take(self, pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
        """The same pieces with their values of now; earlier copies are overwritten."""
        sizes = [piece.numel * piece.dtype.itemsize for piece in pieces]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        from_gpu = any(isinstance(piece.data, Tensor) and piece.data.is_cuda for piece in pieces)
        if end != self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # not both at the same time
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=from_gpu)
        copies = []
        for piece, start, size in zip(pieces, starts, sizes, strict=True):
            data = self._buffer[start : start + size].view(piece.dtype)
            assert isinstance(piece.data, Tensor)
            data.copy_(piece.data.detach().reshape(-1), non_blocking=True)
            copies.append(replace(piece, data=data))
        if from_gpu:
            torch.cuda.synchronize()
        return copies
