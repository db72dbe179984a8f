"""Token files in Megatron's memory-mapped format, read and written: `<prefix>.bin` and `.idx`.

Files written here are byte for byte what Megatron-LM and Megatron-DeepSpeed (mmap) write for the
same documents, and theirs are read as they are; `token_format` describes the bytes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megads.config.data_files import strip_suffix
from megads.data.token_format import (
    MAX_SEQUENCE,
    Header,
    PendingPair,
    chunks,
    read_header,
    sync_and_close,
    write_index,
)
from megads.errors import DataError

_FULL_CHECK = 1_000_000
_SPOT_CHECKS = 256


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Narrowest number type Megatron uses for this vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def exists(prefix: str | os.PathLike[str]) -> bool:
    """Whether both files of a prefix are there."""
    stem = strip_suffix(prefix)
    return os.path.isfile(stem + ".bin") and os.path.isfile(stem + ".idx")


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """An `.idx` opened for reading: its header is checked, its arrays are mapped, not yet read."""

    path: Path
    header: Header
    sizes: NDArray[np.int32]
    """Tokens in each sequence."""
    pointers: NDArray[np.int64]
    """Byte offset of each sequence in .bin."""
    document_bounds: NDArray[np.int64]
    """First sequence of each document, then the number of sequences: `[documents + 1]`."""

    @classmethod
    def open(cls, path: Path) -> TokenIndex:
        """Raises DataError for what is not an index of the size that its header states."""
        header = read_header(path)
        return cls(
            path,
            header,
            _map(path, "<i4", header.sizes_at, header.sequences),
            _map(path, "<i8", header.pointers_at, header.sequences),
            _map(path, "<i8", header.bounds_at, header.marks),
        )

    @property
    def described_bytes(self) -> int:
        """Size of the .bin that the last sequence ends."""
        if not self.header.sequences:
            return 0
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.header.dtype.itemsize

    def size_problems(self, bin_path: Path) -> Iterator[str]:
        """Whether `.bin` has the size described, and the document list its two ends."""
        size, described = bin_path.stat().st_size, self.described_bytes
        if described != size:
            yield (
                f"{bin_path}: {size} bytes, but {self.path.name} describes {described} bytes of "
                f"{self.header.dtype.name} tokens; the file is truncated or belongs to another "
                f"index"
            )
        bounds, n = self.document_bounds, self.header.sequences
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != n:
            yield (
                f"{self.path}: the document list must run from 0 to the number of sequences, "
                f"{n}; it holds {bounds[[0, -1]].tolist() if len(bounds) else 'nothing'}"
            )


class IndexedTokens:
    """A token file opened for reading; nothing but the index's ends is read until asked for.

    Raises DataError naming the file, with the expected and the actual size or value, for a missing,
    truncated or foreign file. The index must describe this .bin: sequences back to back, from its
    start to its end. Indices beyond a million entries are checked at evenly spaced places, so that
    opening is immediate; `inspection.verify` reads everything.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = strip_suffix(prefix)
        self.bin_path = Path(self.prefix + ".bin")
        self.idx_path = Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file (a token file is a pair .bin and .idx)")
        self.index = TokenIndex.open(self.idx_path)
        self.dtype = self.index.header.dtype
        self.sizes, self.pointers = self.index.sizes, self.index.pointers
        self.document_bounds = self.index.document_bounds
        self.num_sequences = self.index.header.sequences
        self.num_documents = self.index.header.marks - 1
        for problem in self.index.size_problems(self.bin_path):
            raise DataError(problem)
        self._check_spots()
        self.num_tokens = self.bin_path.stat().st_size // self.dtype.itemsize
        self.tokens: NDArray[Any] = _map(self.bin_path, self.dtype, 0, self.num_tokens)
        """All token ids in file order, `[num_tokens]`."""

    def document_start(self, document: int) -> int:
        """Position in `tokens` where a document begins, or where the last one ends."""
        sequence = int(self.document_bounds[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def document(self, document: int) -> NDArray[Any]:
        """Token ids of one document, a view of the file."""
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def sequence(self, sequence: int) -> NDArray[Any]:
        """Token ids of one sequence, a view of the file."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[sequence])]

    def _check_spots(self) -> None:
        n, header = self.num_sequences, self.index.header
        where = _spots(n - 1)
        sizes = _read(self.idx_path, "<i4", header.sizes_at, where).astype(np.int64)
        starts = _read(self.idx_path, "<i8", header.pointers_at, where)
        ends = _read(self.idx_path, "<i8", header.pointers_at, where + 1)
        wrong = np.flatnonzero((sizes < 0) | (ends - starts != sizes * self.dtype.itemsize))
        if n and (len(wrong) or self.pointers[0] != 0 or self.sizes[-1] < 0):
            first = int(where[wrong[0]]) if len(wrong) else 0 if self.pointers[0] else n - 1
            raise DataError(
                f"{self.idx_path}: sequence {first} has {self.sizes[first]} tokens at byte "
                f"{self.pointers[first]} and does not end where the next begins"
            )
        places = _spots(header.marks)
        bounds = _read(self.idx_path, "<i8", header.bounds_at, places)
        falls = np.flatnonzero(np.diff(bounds) < 0)
        if len(falls):
            place = int(falls[0])
            raise DataError(
                f"{self.idx_path}: the document list is not in ascending order: document "
                f"{places[place]} begins at sequence {bounds[place]}, document "
                f"{places[place + 1]} at {bounds[place + 1]}"
            )


def _spots(count: int) -> NDArray[np.int64]:
    step = 1 if count <= _FULL_CHECK else count // _SPOT_CHECKS
    return np.arange(0, max(count, 0), step)


def _read(path: Path, dtype: str, offset: int, places: NDArray[np.int64]) -> NDArray[Any]:
    """Entries of an array in a file; by reading, since a touched page of a mapping brings in many
    around it, which then count as this process's memory."""
    item = np.dtype(dtype).itemsize
    if len(places) and int(places[-1] - places[0]) + 1 == len(places):
        return np.fromfile(path, dtype, len(places), offset=offset + int(places[0]) * item)
    with path.open("rb", buffering=0) as file:
        pieces = [os.pread(file.fileno(), item, offset + int(place) * item) for place in places]
    return np.frombuffer(b"".join(pieces), dtype)


def _map(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # an empty range cannot be memory-mapped
        return np.zeros(0, dtype)
    # A plain array over the mapping: slicing np.memmap objects costs several times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


class TokenWriter:
    """Writes a token file as a stream; both files appear, complete, when `close` returns.

    Used as a context manager: leaving it normally closes it, an exception discards what was
    written. Until then the data is in temporary files beside the target. Memory: 12 bytes per
    document.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any) -> None:
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype)
        limits = np.iinfo(self.dtype)
        self._low, self._high = int(limits.min), int(limits.max)
        self._sizes = array("i")
        self._bounds = array("q", [0])
        self._pair = PendingPair(self.prefix)
        self._file = self._pair.bin.open("wb")
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence to the current document.

        Raises DataError when an id does not fit the number type or the sequence is too long.
        """
        ids = np.asarray(tokens)
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise DataError(f"{self.prefix}: token ids must be integers, got {ids.dtype}")
        if ids.size > MAX_SEQUENCE:
            raise DataError(
                f"{self.prefix}: a sequence of {ids.size} tokens; the format holds at most "
                f"{MAX_SEQUENCE}. Split the document"
            )
        if ids.size and (ids.min() < self._low or ids.max() > self._high):
            worst = int(ids.max() if ids.max() > self._high else ids.min())
            raise DataError(f"{self.prefix}: token id {worst} does not fit {self.dtype.name}")
        self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        self._sizes.append(ids.size)
        self.num_tokens += ids.size

    def end_document(self) -> None:
        """Close the current document; one without sequences is allowed, as in Megatron."""
        self._bounds.append(len(self._sizes))

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def close(self) -> None:
        """Make the files durable and move them into place, `.idx` last."""
        sync_and_close(self._file)
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.zeros(0, np.int32)
        bounds = np.frombuffer(self._bounds, np.int64)
        header = Header(self.dtype, len(sizes), len(bounds))
        write_index(self._pair.idx, header, partial(chunks, sizes), chunks(bounds))
        self._pair.publish()

    def discard(self) -> None:
        """Drop everything written so far."""
        self._file.close()
        self._pair.discard()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()
