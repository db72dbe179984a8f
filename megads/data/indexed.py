"""Token files in Megatron's memory-mapped format: a pair `<prefix>.bin` and `<prefix>.idx`.

`.bin` holds the token ids of all sequences one after the other and nothing else. `.idx` holds,
little-endian and without padding:

    9 bytes   the magic `MMIDIDX\\0\\0`
    uint64    version, 1
    uint8     code of the ids' number type
    uint64    number of sequences, S
    uint64    length of the document list, D + 1
    int32  S  tokens in each sequence
    int64  S  byte offset of each sequence in .bin
    int64  D+1  first sequence of each document, then S

Files written here are byte for byte what Megatron-LM and Megatron-DeepSpeed (mmap) write for the
same documents, and theirs are read as they are. Offsets are 64-bit throughout; a sequence holds at
most 2**31 - 1 tokens, the format's own limit, and a longer one is refused.
"""

from __future__ import annotations

import filecmp
import os
import secrets
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megads.config.data_files import strip_suffix
from megads.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_CODES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MAX_SEQUENCE = 2**31 - 1
_FULL_CHECK = 1_000_000
_SPOT_CHECKS = 1000


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Narrowest number type Megatron uses for this vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def exists(prefix: str | os.PathLike[str]) -> bool:
    """Whether both files of a prefix are there."""
    stem = strip_suffix(prefix)
    return os.path.isfile(stem + ".bin") and os.path.isfile(stem + ".idx")


class IndexedTokens:
    """A token file opened for reading; nothing but the header is read until asked for.

    Raises DataError naming the file, with the expected and the actual size or value, for a missing,
    truncated or foreign file.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = strip_suffix(prefix)
        self.bin_path = Path(self.prefix + ".bin")
        self.idx_path = Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file (a token file is a pair .bin and .idx)")
        self.dtype, sequences, documents = _read_header(self.idx_path)
        self.sizes: NDArray[np.int32] = _map(self.idx_path, "<i4", _HEADER.size, sequences)
        """Tokens in each sequence."""
        offset = _HEADER.size + 4 * sequences
        self.pointers: NDArray[np.int64] = _map(self.idx_path, "<i8", offset, sequences)
        """Byte offset of each sequence in .bin."""
        offset += 8 * sequences
        self.document_bounds: NDArray[np.int64] = _map(self.idx_path, "<i8", offset, documents)
        """First sequence of each document, then the number of sequences: `[documents + 1]`."""
        self.num_sequences, self.num_documents = sequences, documents - 1
        self._check()
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

    def _check(self) -> None:
        """The index must describe this .bin: sequences back to back, from its start to its end."""
        size, item = self.bin_path.stat().st_size, self.dtype.itemsize
        n, bounds = self.num_sequences, self.document_bounds
        end = int(self.pointers[-1]) + int(self.sizes[-1]) * item if n else 0
        if end != size:
            raise DataError(
                f"{self.bin_path}: {size} bytes, but {self.idx_path.name} describes {end} bytes of "
                f"{self.dtype.name} tokens; the file is truncated or belongs to another index"
            )
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != n:
            raise DataError(
                f"{self.idx_path}: the document list must run from 0 to the number of sequences, "
                f"{n}; it holds {bounds[[0, -1]].tolist() if len(bounds) else 'nothing'}"
            )
        # Large indices are checked at evenly spaced places, so that opening stays immediate.
        step = _check_stride(n)
        where = np.arange(0, max(n - 1, 0), step)
        lengths = self.sizes[where].astype(np.int64)
        gaps = self.pointers[where + 1] - self.pointers[where]
        wrong = np.flatnonzero((lengths < 0) | (gaps != lengths * item))
        if n and (len(wrong) or self.pointers[0] != 0 or self.sizes[-1] < 0):
            first = int(where[wrong[0]]) if len(wrong) else 0
            raise DataError(
                f"{self.idx_path}: sequence {first} has {self.sizes[first]} tokens at byte "
                f"{self.pointers[first]} and does not end where the next begins"
            )
        steps = np.diff(bounds[:: _check_stride(len(bounds))])
        if len(steps) and steps.min() < 0:
            raise DataError(f"{self.idx_path}: the document list is not in ascending order")


def _check_stride(count: int) -> int:
    return 1 if count <= _FULL_CHECK else count // _SPOT_CHECKS


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
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
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: format version {version}, only {VERSION} is known")
    if code not in _CODES:
        raise DataError(
            f"{path}: number type code {code} is not one of {sorted(_CODES)} (integers)"
        )
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise DataError(
            f"{path}: {size} bytes, expected {expected} for {sequences} sequences and a document "
            f"list of {documents}"
        )
    return np.dtype(_CODES[code]), sequences, documents


def _map(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # an empty range cannot be memory-mapped
        return np.zeros(0, dtype)
    # A plain array over the mapping: slicing np.memmap objects costs several times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


class TokenWriter:
    """Writes a token file as a stream; both files appear, complete, when `close` returns.

    Used as a context manager: leaving it normally closes it, an exception discards what was
    written. Until then the data is in temporary files beside the target.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any) -> None:
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype)
        limits = np.iinfo(self.dtype)
        self._low, self._high = int(limits.min), int(limits.max)
        self._sizes: list[int] = []
        self._bounds: list[int] = [0]
        tag = f"tmp-{os.getpid()}-{secrets.token_hex(4)}"
        self._bin = Path(f"{self.prefix}.bin.{tag}")
        self._idx = Path(f"{self.prefix}.idx.{tag}")
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._bin.open("wb")
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
        if ids.size > _MAX_SEQUENCE:
            raise DataError(
                f"{self.prefix}: a sequence of {ids.size} tokens; the format holds at most "
                f"{_MAX_SEQUENCE}. Split the document"
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
        _sync_and_close(self._file)
        write_index(self._idx, self._sizes, self._bounds, self.dtype)
        index = Path(self.prefix + ".idx")
        if index.exists() and not filecmp.cmp(index, self._idx, shallow=False):
            # An interruption must not leave the new tokens under the old index.
            index.unlink()
        os.replace(self._bin, self.prefix + ".bin")
        os.replace(self._idx, index)
        _sync_directory(index.parent)

    def discard(self) -> None:
        """Drop everything written so far."""
        self._file.close()
        self._bin.unlink(missing_ok=True)
        self._idx.unlink(missing_ok=True)

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


def write_index(path: Path, sizes: ArrayLike, document_bounds: ArrayLike, dtype: Any) -> None:
    """Write and fsync an index of sequences that lie back to back in a .bin file.

    `sizes`: tokens in each sequence. `document_bounds`: see `IndexedTokens.document_bounds`.
    """
    code = {np.dtype(name): number for number, name in _CODES.items()}[np.dtype(dtype)]
    lengths = np.asarray(sizes, dtype=np.int64)
    bounds = np.asarray(document_bounds, dtype="<i8")
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1] * np.dtype(dtype).itemsize, out=pointers[1:])
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(bounds)))
        for part in (lengths.astype("<i4"), pointers, bounds):
            file.write(part.tobytes())
        _sync_and_close(file)


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
