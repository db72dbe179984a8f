"""A file as `torch.save` writes it, of tensors that are made one at a time.

`torch.save` has all tensors in memory before the first is written; a rank's share of a large model
need not fit.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megads.errors import CheckpointError

_ALIGNMENT = 64
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


@dataclass(frozen=True)
class Pending:
    """Stands for a tensor among what is saved; `make` gives it when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def save(content: Any, path: Path) -> None:
    """Write `content`, with its `Pending` as tensors in memory of their own, and sync it.

    `torch.load` reads it, mapped or not. Raises CheckpointError if one is not of the shape or the
    type it was said to have.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, protocol=2)
    pickler.dump(content)
    with open(path, "wb") as handle:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", pickled.getvalue())
            archive.writestr("archive/byteorder", b"little")
            for number, pending in enumerate(pickler.pending):
                _write(archive, handle, f"archive/data/{number}", pending)
            archive.writestr("archive/version", b"3\n")
        handle.flush()
        os.fsync(handle.fileno())


@dataclass(frozen=True)
class _Storage:
    """The elements of a tensor, which the pickle only refers to."""

    number: int
    pending: Pending


class _Pickler(pickle.Pickler):
    """Notes what it meets of `Pending`, in the order in which they are to be written."""

    def __init__(self, file: io.BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.pending: list[Pending] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Pending):
            return NotImplemented
        storage = _Storage(len(self.pending), value)
        self.pending.append(value)
        steps = [math.prod(value.shape[dim + 1 :]) for dim in range(len(value.shape))]
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (storage, 0, value.shape, tuple(steps), False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        pending = value.pending
        if pending.dtype not in _STORAGES:
            raise CheckpointError(f"cannot write {pending.dtype}; choose another with --dtype")
        kind, count = _STORAGES[pending.dtype], math.prod(pending.shape)
        return "storage", kind, str(value.number), "cpu", count


def _write(archive: zipfile.ZipFile, handle: BinaryIO, name: str, pending: Pending) -> None:
    tensor = pending.make()
    if tuple(tensor.shape) != pending.shape or tensor.dtype != pending.dtype:
        raise CheckpointError(
            f"a tensor of {pending.dtype} and shape {pending.shape} was to be written, and is of "
            f"{tensor.dtype} and shape {tuple(tensor.shape)}"
        )
    entry = zipfile.ZipInfo(name)
    entry.file_size = math.prod(pending.shape) * pending.dtype.itemsize
    big = entry.file_size > zipfile.ZIP64_LIMIT // 2
    # The elements are to be at a multiple of 64 bytes, as torch.save has it: a field pads them.
    start = handle.tell() + 30 + len(name) + 4 + (20 if big else 0)
    padding = -start % _ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(entry, "w", force_zip64=big) as out:
        out.write(tensor.flatten().view(torch.uint8).numpy().data)
