"""Pieces of the input that one worker turns into texts, a MiB or so each.

A chunk is small to send to another process: either it says which bytes of a file to read, or it
carries bytes that had to be read in order (out of a compressed file, or up to a separator). How an
input is cut depends on its content only, never on the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megads.errors import DataError

CHUNK_BYTES = 1 << 20
"""Aimed size; a document larger than this makes a chunk of its own that is as large."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Chunk(Protocol):
    """Consecutive documents of one input.

    `size`: bytes of text, unpacked, for the rate that is reported. `packed`: bytes of the input
    that are done when this chunk is, beyond the chunk before, in the unit of the input's own size.
    """

    @property
    def size(self) -> int: ...
    @property
    def packed(self) -> int: ...
    @property
    def where(self) -> str:
        """Names the place of the chunk in a message."""
        ...

    def texts(self) -> Iterator[str]:
        """The documents. Raises DataError naming the place of one that cannot be read."""
        ...


class Input(Protocol):
    """One file or data set.

    `size`: bytes to read in all, None if unknown, in the unit of `Chunk.packed`.
    `identity` changes when the content does. `chunks` gives the same ones each time.
    """

    @property
    def identity(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    def chunks(self) -> Iterator[Chunk]: ...


@dataclass(frozen=True)
class LineRange:
    """The JSON lines of a plain file that begin at bytes `begin` to `end`, read by the worker."""

    path: Path
    begin: int
    end: int
    key: str

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def packed(self) -> int:
        return self.size

    @property
    def where(self) -> str:
        return f"{self.path}, from byte {self.begin}"

    def texts(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            position = self.begin
            if position:
                # The line that the range begins in belongs to the range before.
                file.seek(position - 1)
                rest = file.readline(self.size + 1)
                if not rest.endswith(b"\n"):
                    return
                position += len(rest) - 1
            while position < self.end and (line := file.readline()):
                if position == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                try:
                    text = parse_line(line, self.key)
                except ValueError as error:
                    number = _lines_before(self.path, position) + 1
                    raise DataError(f"{self.path}, line {number}: {error}") from error
                if text is not None:
                    yield text
                position = file.tell()


@dataclass(frozen=True)
class Lines:
    """Whole JSON lines out of a compressed file; `first` is the number of the first, from 1."""

    path: Path
    first: int
    data: bytes
    packed: int
    key: str

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def where(self) -> str:
        return f"{self.path}, from line {self.first}"

    def texts(self) -> Iterator[str]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                text = parse_line(line, self.key)
            except ValueError as error:
                raise DataError(f"{self.path}, line {number}: {error}") from error
            if text is not None:
                yield text


@dataclass(frozen=True)
class Passages:
    """Documents of a text file; the first begins at byte `begin` of the unpacked file."""

    path: Path
    begin: int
    documents: Sequence[bytes]
    separator_bytes: int
    packed: int

    @property
    def size(self) -> int:
        return sum(map(len, self.documents)) + self.separator_bytes * len(self.documents)

    @property
    def where(self) -> str:
        return f"{self.path}, from byte {self.begin}"

    def texts(self) -> Iterator[str]:
        position = self.begin
        for document in self.documents:
            skip = 3 if position == 0 and document.startswith(BYTE_ORDER_MARK) else 0
            try:
                yield document[skip:].decode("utf-8")
            except UnicodeDecodeError as error:
                at = position + skip + error.start
                raise DataError(f"{self.path}: not UTF-8 text at byte {at}") from error
            position += len(document) + self.separator_bytes


@dataclass(frozen=True)
class Rows:
    """Texts of a table; `first` is the number of the first row, from 0."""

    name: str
    first: int
    rows: Sequence[str]
    size: int
    packed: int

    @property
    def where(self) -> str:
        return f"{self.name}, from row {self.first}"

    def texts(self) -> Iterator[str]:
        yield from self.rows


def parse_line(line: bytes, key: str) -> str | None:
    """The text of one JSON line, None for white space. Raises ValueError that says what is wrong.

    JSON can escape half a surrogate pair, which no encoding can hold: it becomes U+FFFD.
    """
    if not line or line.isspace():
        return None
    try:
        decoded = line.decode("utf-8")
        record = json.loads(decoded)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not readable JSON (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with the key {key!r}, found {type(record).__name__}")
    if key not in record:
        raise ValueError(f"no key {key!r}; the line has {sorted(record)}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} must be a string, found {type(text).__name__}")
    if "\\ud" in decoded or "\\uD" in decoded:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _lines_before(path: Path, position: int) -> int:
    count = 0
    with path.open("rb") as file:
        while position > 0 and (block := file.read(min(position, CHUNK_BYTES))):
            count += block.count(b"\n")
            position -= len(block)
    return count
