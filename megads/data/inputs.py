"""What can be tokenized, opened and cut into chunks.

- `.jsonl` (or `.json`): one JSON object a line, its text under one key. Lines of white space are
  passed over. A line that is not an object, lacks the key or holds no string there is an error
  that names file and line.
- `.parquet`: a text column, of the name of that key.
- `hf:NAME[:CONFIG][@SPLIT]`, or a folder that `datasets` saved: see `megads.data.tables`.
- anything else is plain text: documents are what lies between form feeds (page breaks), or between
  occurrences of `split_on`; a file without any is one document. Line ends are kept as they are.
- JSON lines and text also with `.gz` or `.zst` after it.

Everything is UTF-8. Memory: a few MiB and the longest document, however large a file is.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megads.config.streams import HUB
from megads.data.chunks import CHUNK_BYTES, Chunk, Input, LineRange, Lines, Passages
from megads.data.tables import open_table
from megads.data.tokenizer import file_identity
from megads.errors import DataError
from megads.extras import load_extra

_JSON = (".jsonl", ".json")
_PACKED = (".gz", ".zst")
_ZSTD_READ_BYTES = 128
"""Little, as each byte of a zstd file can stand for thousands."""


def open_input(spec: str | Path, key: str, split_on: str) -> Input:
    """The input that a file name, a folder or `hf:...` stands for.

    Raises DataError when it is not there, is nothing that can be read, or needs a package that is
    not installed.
    """
    path = Path(spec)
    if str(spec).startswith(HUB) or path.is_dir() or path.suffix == ".parquet":
        return open_table(str(spec), key)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not split_on:
        raise DataError(f"{path}: the string between documents of a text must not be empty")
    packed = path.suffix in _PACKED
    if path.suffix == ".zst":
        load_extra("zstandard", path)
    kind = path.with_suffix("").suffix if packed else path.suffix
    if kind not in _JSON:
        return TextFile(path, split_on.encode())
    return PackedLinesFile(path, key) if packed else LinesFile(path, key)


@dataclass(frozen=True)
class _File:
    """What is known of any file before it is read."""

    path: Path

    @property
    def identity(self) -> str:
        return file_identity(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class LinesFile(_File):
    """Plain JSON lines: workers read their own ranges of the file."""

    key: str

    def chunks(self) -> Iterator[Chunk]:
        size = self.size
        for begin in range(0, size, CHUNK_BYTES):
            yield LineRange(self.path, begin, min(begin + CHUNK_BYTES, size), self.key)


@dataclass(frozen=True)
class PackedLinesFile(_File):
    """Compressed JSON lines: unpacked here, cut at line ends."""

    key: str

    def chunks(self) -> Iterator[Chunk]:
        blocks, line, done, rest = Blocks(self.path), 1, 0, bytearray()
        for block in blocks:
            cut = block.rfind(b"\n") + 1
            rest += block[:cut] if cut else block
            if cut:
                yield Lines(self.path, line, bytes(rest), blocks.position - done, self.key)
                line, done = line + rest.count(b"\n"), blocks.position
                rest = bytearray(block[cut:])
        if rest:
            yield Lines(self.path, line, bytes(rest), blocks.position - done, self.key)


@dataclass(frozen=True)
class TextFile(_File):
    """Plain or compressed text, cut at its separators."""

    separator: bytes

    def chunks(self) -> Iterator[Chunk]:
        blocks, gap = Blocks(self.path), len(self.separator)
        begin = size = done = 0
        documents: list[bytes] = []
        for document in split_stream(blocks, self.separator):
            documents.append(document)
            size += len(document) + gap
            if size >= CHUNK_BYTES:
                yield Passages(self.path, begin, documents, gap, blocks.position - done)
                begin, size, done, documents = begin + size, 0, blocks.position, []
        if documents:
            yield Passages(self.path, begin, documents, gap, blocks.position - done)


def split_stream(blocks: Iterator[bytes] | Blocks, separator: bytes) -> Iterator[bytes]:
    """What `b"".join(blocks).split(separator)` gives, in memory of one block and one document."""
    buffer, searched = bytearray(), 0
    for block in blocks:
        buffer += block
        start, at = 0, buffer.find(separator, searched)
        while at >= 0:
            yield bytes(buffer[start:at])
            start = at + len(separator)
            at = buffer.find(separator, start)
        del buffer[:start]
        # Not again from the start, which for a long document would take quadratic time.
        searched = max(0, len(buffer) - len(separator) + 1)
    yield bytes(buffer)


class Blocks:
    """The unpacked bytes of a plain, gzip or zstd file, CHUNK_BYTES at a time.

    `position`: bytes of the file itself read so far. Raises DataError naming a file that is
    truncated or damaged, when its reader gets there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            if self.path.suffix in _PACKED and self.path.stat().st_size == 0:
                raise DataError(f"{self.path}: 0 bytes, not even an empty {self.path.suffix} file")
            if self.path.suffix == ".zst":
                yield from self._tracked(_even_blocks(_unpack_zstd(self.path, file)), file)
            elif self.path.suffix == ".gz":
                yield from self._tracked(_unpack_gzip(self.path, file), file)
            else:
                yield from self._tracked(iter(lambda: file.read(CHUNK_BYTES), b""), file)

    def _tracked(self, blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
        for block in blocks:
            self.position = file.tell()
            yield block


def _unpack_gzip(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") as unpacked:
            while block := unpacked.read(CHUNK_BYTES):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated gzip file ({error})") from error


def _unpack_zstd(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: the library's own reader takes a truncated file for a finished one."""
    zstandard = load_extra("zstandard", path)
    # As wide as `zstd --long=31` writes.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    try:
        while data := file.read(_ZSTD_READ_BYTES):
            while data:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged zstd file ({error})") from error
    if frame is not None:
        raise DataError(f"{path}: truncated zstd file, {path.stat().st_size} bytes")


def _even_blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks whose sizes do not depend on how the library delivers them."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= CHUNK_BYTES:
            yield bytes(buffer[:CHUNK_BYTES])
            del buffer[:CHUNK_BYTES]
    if buffer:
        yield bytes(buffer)
