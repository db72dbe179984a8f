"""The files of `torch.save` as bytes: where the pickle and the tensors' elements are. Runs nothing.

Elements are mapped, not read: a tensor costs memory when it is touched.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megads.errors import CheckpointError


class MappedFile:
    """A file of which pieces are handed out as one-dimensional tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = os.path.getsize(path)
        self._bytes = torch.UntypedStorage.from_file(str(path), False, self.size)

    def elements(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements from byte `start`; writing to them never reaches the file.

        Raises CheckpointError if the file does not have them.
        """
        stop = start + count * dtype.itemsize
        if start < 0 or count < 0 or stop > self.size:
            raise CheckpointError(f"ends at byte {self.size}, and should hold {start} to {stop}")
        piece = self._bytes[start:stop]
        return torch.empty(0, dtype=dtype).set_(piece, 0, (count,), (1,))


@dataclass(frozen=True)
class Span:
    """Where an entry of an archive is, in bytes of the file."""

    start: int
    size: int


class Archive:
    """A zip archive of `torch.save`, which may lie inside a larger file.

    Raises CheckpointError if it is damaged or of another kind.
    """

    def __init__(self, file: MappedFile, window: Span | None = None) -> None:
        self._file = file
        window = window or Span(0, file.size)
        if window.start < 0 or window.size < 0 or window.start + window.size > file.size:
            raise CheckpointError(
                f"ends at byte {file.size}, and should hold {window.size} bytes from {window.start}"
            )
        with open(file.path, "rb") as handle:
            self._entries = _entries(handle, window)
            if "constants.pkl" in self._entries:
                raise CheckpointError("refused: it is TorchScript, which is code")
            if self._text(handle, "byteorder") not in (None, b"little"):
                raise CheckpointError("its numbers are not little-endian")
            pickled = self._text(handle, "data.pkl")
        if pickled is None:
            raise CheckpointError(
                "is a zip archive without a data.pkl: torch.save did not write it"
            )
        self.pickled = pickled

    def storage(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """The elements of storage `key`, mapped."""
        span = self._entries.get(f"data/{key}")
        if span is None:
            raise CheckpointError(f"lacks the elements of storage {key}")
        if count * dtype.itemsize > span.size:
            raise CheckpointError(
                f"storage {key} has {span.size} bytes, and should have {count * dtype.itemsize}"
            )
        return self._file.elements(span.start, count, dtype)

    def _text(self, handle: BinaryIO, name: str) -> bytes | None:
        span = self._entries.get(name)
        if span is None:
            return None
        handle.seek(span.start)
        return handle.read(span.size)


def _entries(handle: BinaryIO, window: Span) -> Mapping[str, Span]:
    """The entries of a zip archive by name, the leading folder left out."""
    found: dict[str, Span] = {}
    try:
        archive = zipfile.ZipFile(_Window(handle, window))
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"is damaged or cut short: {error}") from None
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(f"holds {entry.filename} compressed, as torch.save never does")
        name = entry.filename.partition("/")[2]
        if name in found:
            raise CheckpointError(f"holds {entry.filename} twice")
        handle.seek(window.start + entry.header_offset)
        header = handle.read(30)
        if header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"is damaged: there is no {entry.filename} where it should be")
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + 30 + names
        if start + entry.file_size > window.size:
            raise CheckpointError(f"is cut short: {entry.filename} goes on beyond its end")
        found[name] = Span(window.start + start, entry.file_size)
    return found


class _Window(RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, handle: BinaryIO, window: Span) -> None:
        self._handle, self._window, self._at = handle, window, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        base = {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._window.size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._window.size - self._at))
        self._handle.seek(self._window.start + self._at)
        data = self._handle.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
