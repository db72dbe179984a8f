"""Digests of files, block by block, so that whoever reads a part of a file can check that part.

A block is a matrix of 64-bit words (the last block filled up with zeros). Its digest is the CRC-32
of the sums of its rows and of its columns, modulo 2^64: sums run at the speed of memory, which a
checksum of every byte does not without special hardware, and the CRC sees few bytes. A flipped bit,
a torn, lost, zeroed or misplaced sector changes some of the sums; what escapes would have to cancel
out in every row and in every column, or collide in 32 bits.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

from megads.checkpoint.manifest import BLOCK, SUMS, FileEntry
from megads.errors import CheckpointError, DamageError

_COLUMNS = 512
_ROW = 8 * _COLUMNS
_CHUNK = 16 << 20  # bytes per write
_SMALL = 64 << 10  # bytes that are hashed sooner than another thread is woken


def block_digest(block: numpy.ndarray) -> str:
    """Digest of the bytes of one block: whole rows, 64-bit aligned."""
    words = block.view("<u8").reshape(-1, _COLUMNS)
    digest = zlib.crc32(numpy.add.reduce(words, axis=0))
    return f"{zlib.crc32(numpy.add.reduce(words, axis=1), digest):08x}"


class FileDigest:
    """The digest of a file from its bytes in order."""

    def __init__(self) -> None:
        self._block = numpy.empty(BLOCK, numpy.uint8)
        self._filled = 0
        self._digests: list[str] = []

    def update(self, data: memoryview) -> None:
        """Take the bytes that come next."""
        source = numpy.frombuffer(data, numpy.uint8)
        while len(source):
            part = source[: BLOCK - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            source = source[len(part) :]
            if self._filled == BLOCK:
                self._finish_block()

    def text(self) -> str:
        """The digest in the manifest's spelling. Nothing can be added afterwards."""
        if self._filled:
            self._finish_block()
        return SUMS + "".join(self._digests)

    def _finish_block(self) -> None:
        rows = -(-self._filled // _ROW) * _ROW
        self._block[self._filled : rows] = 0
        self._digests.append(block_digest(self._block[:rows]))
        self._filled = 0


def write_blocks(path: Path, parts: Iterable[memoryview]) -> FileEntry:
    """Write the parts one after the other to a new file; they are on the disk on return.

    Each part is hashed while it is written. Raises OSError.
    """
    digest = FileDigest()
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                if len(chunk) < _SMALL:
                    digest.update(chunk)
                    _write_all(file.write, chunk)
                    continue
                hashing = hasher.submit(digest.update, chunk)
                try:
                    _write_all(file.write, chunk)
                finally:
                    hashing.result()
        os.fsync(file.fileno())
        return FileEntry(size=file.tell(), digest=digest.text())


def _write_all(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Unbuffered writes may be short (a nearly full disk, a signal)."""
    while data:
        data = data[write(data) or 0 :]


def check_whole(path: Path, entry: FileEntry) -> None:
    """Hold a whole file against its digest, of either format version. Raises DamageError."""
    with BlockReader(path, entry) as reader:
        digest = 0
        for start in range(0, entry.size, BLOCK):
            data = reader.read(start, min(start + BLOCK, entry.size))
            if not entry.digest.startswith(SUMS):
                digest = zlib.crc32(data.data, digest)
    found = f"crc32:{digest:08x}"
    if not entry.digest.startswith(SUMS) and found != entry.digest:
        raise DamageError(f"{path} is damaged: digest {found} instead of {entry.digest}")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What a file of a checkpoint that cannot be opened or read means: damage if it is gone. Else
    it may be whole, on a disk or a server that will answer again, and is not to be given up."""
    text = f"cannot read {path}: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        return DamageError(text)
    failure = CheckpointError(
        f"{text}. It is not known to be damaged; to go on from an older checkpoint all the same, "
        f"move {path.parent} away"
    )
    failure.may_pass = True
    return failure


class BlockReader:
    """Checked bytes of a file: every block is held against its digest before any of it is used.

    Blocks pass through a window of memory that grows to the largest range asked for. A context
    manager. Raises DamageError naming the file and the bytes that are not what was written, and
    what `unreadable` makes of other errors.
    """

    def __init__(self, path: Path, entry: FileEntry, *, window: int = 4 << 20) -> None:
        self._path, self._entry = path, entry
        self._window = numpy.empty(window, numpy.uint8)
        self._start = self._stop = 0
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error
        actual = os.fstat(self._file).st_size
        if actual != entry.size:
            os.close(self._file)
            raise DamageError(f"{path} is damaged: {actual} bytes instead of {entry.size}")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def read(self, start: int, stop: int, *, ahead: int = 0) -> numpy.ndarray:
        """The bytes [start, stop), valid until the next call; up to `ahead` may be read with them.

        `stop` must not be beyond the end of the file.
        """
        if start < self._start or stop > self._stop:
            low = start // BLOCK * BLOCK
            wanted = max(stop, min(ahead, low + len(self._window)))
            self._load(low, min(-(-wanted // BLOCK) * BLOCK, self._entry.size))
        return self._window[start - self._start : stop - self._start]

    def _load(self, start: int, stop: int) -> None:
        length = stop - start
        rows = -(-length // _ROW) * _ROW
        if rows > len(self._window):
            self._window = numpy.empty(-(-rows // BLOCK) * BLOCK, numpy.uint8)
        self._start = self._stop = start
        done = 0
        for low in range(start, stop, BLOCK):
            size = min(BLOCK, stop - low)
            self._fill(low, size, done)
            self._check(low, size, done)
            done += size
        self._stop = stop

    def _fill(self, offset: int, size: int, at: int) -> None:
        done = 0
        while done < size:
            try:
                view = self._window.data[at + done : at + size]
                count = os.preadv(self._file, [view], offset + done)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not count:
                raise DamageError(f"{self._path} is damaged: it ends at {offset + done}")
            done += count

    def _check(self, offset: int, size: int, at: int) -> None:
        expected = self._entry.block_digest(offset // BLOCK)
        if expected is None:
            return
        rows = -(-size // _ROW) * _ROW
        self._window[at + size : at + rows] = 0
        found = block_digest(self._window[at : at + rows])
        if found != expected:
            raise DamageError(
                f"{self._path} is damaged: bytes {offset} to {offset + size} have digest {found} "
                f"instead of {expected}"
            )
