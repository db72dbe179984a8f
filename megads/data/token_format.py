"""The bytes of a token file: the header and arrays of `.idx`, and how a new pair gets into place.

A token file is a pair. `.bin` holds the token ids of all sequences one after the other and nothing
else. `.idx` holds, little-endian and without padding:

    9 bytes   the magic `MMIDIDX\\0\\0`
    uint64    version, 1
    uint8     code of the ids' number type
    uint64    number of sequences, S
    uint64    length of the document list, D + 1
    int32  S  tokens in each sequence
    int64  S  byte offset of each sequence in .bin
    int64  D+1  first sequence of each document, then S

This is Megatron's memory-mapped format, byte for byte. Offsets are 64-bit throughout; a sequence
holds at most 2**31 - 1 tokens, the format's own limit.
"""

from __future__ import annotations

import filecmp
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megads.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CHUNK = 1 << 20
"""Entries of an index that are held in memory at once when all of them are walked."""
MAX_SEQUENCE = 2**31 - 1
_HEADER = struct.Struct("<9sQBQQ")
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_CODES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Header:
    """What the first bytes of an `.idx` say; the arrays follow at fixed places."""

    dtype: np.dtype[Any]
    """Number type of the ids."""
    sequences: int
    marks: int
    """Length of the document list: the number of documents plus one."""

    @property
    def sizes_at(self) -> int:
        return _HEADER.size

    @property
    def pointers_at(self) -> int:
        return self.sizes_at + 4 * self.sequences

    @property
    def bounds_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def file_size(self) -> int:
        """Bytes that the whole index must have."""
        return self.bounds_at + 8 * self.marks

    def pack(self) -> bytes:
        """The header as it stands in the file."""
        codes = {np.dtype(name): number for number, name in _CODES.items()}
        return _HEADER.pack(MAGIC, VERSION, codes[self.dtype], self.sequences, self.marks)


def read_header(path: Path) -> Header:
    """The header of an index whose size agrees with it.

    Raises DataError naming the file and both values for a foreign, damaged or truncated one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if head.startswith(_LEGACY_MAGIC):
        raise DataError(
            f"{path}: written by the older 'lazy' or 'cached' dataset classes (TNTIDX); tokenize "
            f"the text again with megads-preprocess"
        )
    if not head.startswith(MAGIC):
        raise DataError(
            f"{path}: not a token index; it begins with {head[:9]!r}, expected {MAGIC!r}"
        )
    if len(head) < _HEADER.size:
        raise DataError(f"{path}: {size} bytes, a token index has at least {_HEADER.size}")
    _, version, code, sequences, marks = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: format version {version}, only {VERSION} is known")
    if code not in _CODES:
        raise DataError(
            f"{path}: number type code {code} is not one of {sorted(_CODES)} (integers)"
        )
    header = Header(np.dtype(_CODES[code]), sequences, marks)
    if size != header.file_size:
        raise DataError(
            f"{path}: {size} bytes, expected {header.file_size} for {sequences} sequences and a "
            f"document list of {marks}"
        )
    return header


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array in pieces of CHUNK entries, views of it."""
    for start in range(0, len(array), CHUNK):
        yield array[start : start + CHUNK]


def write_index(
    path: Path,
    header: Header,
    sizes: Callable[[], Iterable[NDArray[Any]]],
    bounds: Iterable[NDArray[Any]],
) -> None:
    """Write and fsync an index of sequences that lie back to back, in memory of a few chunks.

    `sizes()` gives the tokens in each sequence in pieces, from the start each time it is called;
    `bounds` the whole document list in pieces.
    """
    with path.open("wb") as file:
        file.write(header.pack())
        for piece in sizes():
            file.write(piece.astype("<i4").tobytes())
        start = 0
        for piece in sizes():
            ends = start + np.cumsum(piece, dtype=np.int64) * header.dtype.itemsize
            file.write(np.concatenate(([start], ends[:-1])).astype("<i8").tobytes())
            start = int(ends[-1])
        for piece in bounds:
            file.write(piece.astype("<i8").tobytes())
        sync_and_close(file)


class PendingPair:
    """A token file being written: two temporary files beside the place where it will be."""

    def __init__(self, prefix: str) -> None:
        tag = f"tmp-{os.getpid()}-{secrets.token_hex(4)}"
        self.prefix = prefix
        self.bin = Path(f"{prefix}.bin.{tag}")
        self.idx = Path(f"{prefix}.idx.{tag}")
        self.bin.parent.mkdir(parents=True, exist_ok=True)

    def publish(self) -> None:
        """Move the finished and synced files into place, `.idx` last, and make that durable."""
        index = Path(self.prefix + ".idx")
        if index.exists() and not filecmp.cmp(index, self.idx, shallow=False):
            # An interruption must not leave the new tokens under the old index.
            index.unlink()
        os.replace(self.bin, self.prefix + ".bin")
        os.replace(self.idx, index)
        descriptor = os.open(index.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Drop what is still under a temporary name."""
        self.bin.unlink(missing_ok=True)
        self.idx.unlink(missing_ok=True)


def sync_and_close(file: BinaryIO) -> None:
    """Have the bytes on the disk before the file gets its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
