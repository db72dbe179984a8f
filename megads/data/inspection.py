"""Looking into a token file: what it holds, and whether all of it is as it must be.

Everything is read in pieces, so memory stays small whatever the size of the file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megads.config.data_files import strip_suffix
from megads.data.indexed import IndexedTokens, TokenIndex
from megads.data.token_format import CHUNK
from megads.errors import DataError

_TOKENS_AT_ONCE = 1 << 22
_NAMED = 5
"""How many places of one kind of damage are named; the rest is counted."""


@dataclass(frozen=True)
class TokenFacts:
    """What a token file holds; lengths are in tokens."""

    dtype: str
    documents: int
    sequences: int
    tokens: int
    empty: int
    """Documents without a token."""
    longest: int
    """Length of the longest document; 0 when there is none."""
    shortest: int
    """Length of the shortest document, empty ones included; 0 when there is none."""
    bin_bytes: int
    idx_bytes: int


def token_facts(file: IndexedTokens) -> TokenFacts:
    """The facts of an opened file, from its index alone."""
    empty = longest = 0
    shortest: int | None = None
    for lengths in document_lengths(file):
        empty += int((lengths == 0).sum())
        longest = max(longest, int(lengths.max()))
        least = int(lengths.min())
        shortest = least if shortest is None else min(shortest, least)
    return TokenFacts(
        dtype=file.dtype.name,
        documents=file.num_documents,
        sequences=file.num_sequences,
        tokens=file.num_tokens,
        empty=empty,
        longest=longest,
        shortest=shortest or 0,
        bin_bytes=file.bin_path.stat().st_size,
        idx_bytes=file.idx_path.stat().st_size,
    )


def document_lengths(file: IndexedTokens) -> Iterator[NDArray[np.int64]]:
    """Tokens in each document, in pieces of at most CHUNK documents."""
    end = file.num_tokens * file.dtype.itemsize
    for start in range(0, file.num_documents, CHUNK):
        first = file.document_bounds[start : start + CHUNK + 1]
        offsets = np.full(len(first), end, dtype=np.int64)
        inside = first < file.num_sequences
        offsets[inside] = file.pointers[first[inside]]
        yield np.diff(offsets) // file.dtype.itemsize


@dataclass
class _Places:
    """Places where one rule is broken: the first few in words, the others as a number."""

    rule: str
    named: list[str] = field(default_factory=list)
    count: int = 0

    def messages(self) -> Iterator[str]:
        yield from (f"{self.rule}: {place}" for place in self.named)
        if self.count > len(self.named):
            yield f"{self.rule}: and {self.count - len(self.named)} more"


def index_problems(index: TokenIndex) -> Iterator[str]:
    """Every sequence must end where the next begins, every document begin no earlier than the one
    before. All entries are read. What is wrong, in words, a few places of each kind named."""
    sizes, pointers, item = index.sizes, index.pointers, index.header.dtype.itemsize
    if len(pointers) and pointers[0] != 0:
        yield f"{index.path}: sequence 0 begins at byte {pointers[0]}, expected 0"
    negative = _Places(f"{index.path}: a sequence of negative length")
    apart = _Places(f"{index.path}: a sequence does not end where the next begins")
    for start in range(0, len(sizes), CHUNK):
        size = sizes[start : start + CHUNK].astype(np.int64)
        begin = pointers[start : start + CHUNK + 1]
        for i in _find(size < 0, negative):
            negative.named.append(f"sequence {start + i} has {size[i]} tokens")
        gap = np.diff(begin)
        for i in _find(gap != size[: len(gap)] * item, apart):
            apart.named.append(
                f"sequence {start + i} has {size[i]} tokens at byte {begin[i]}, so the next "
                f"belongs at {begin[i] + size[i] * item}, but it is at {begin[i + 1]}"
            )
    falls = _Places(f"{index.path}: the document list is not in ascending order")
    for start in range(0, len(index.document_bounds), CHUNK):
        bound = index.document_bounds[start : start + CHUNK + 1]
        for i in _find(np.diff(bound) < 0, falls):
            falls.named.append(
                f"document {start + i} begins at sequence {bound[i]}, the next at {bound[i + 1]}"
            )
    for places in (negative, apart, falls):
        yield from places.messages()


def _find(broken: NDArray[np.bool_], places: _Places) -> list[int]:
    """Count the places and return those that are still to be named."""
    found = np.flatnonzero(broken)
    places.count += len(found)
    return [int(i) for i in found[: _NAMED - len(places.named)]]


@dataclass(frozen=True)
class Verification:
    """The result of reading a whole token file."""

    problems: tuple[str, ...]
    documents: int = 0
    tokens: int = 0
    largest_id: int | None = None
    """None when there is no token."""


def verify(prefix: str | os.PathLike[str], vocab_size: int | None = None) -> Verification:
    """Read a token file from end to end and collect everything that is wrong with it.

    Checked are both files' sizes, the header, every entry of the index, and every id: none below 0
    nor, with a `vocab_size`, above the vocabulary. Nothing is raised for a bad file.
    """
    stem = strip_suffix(prefix)
    idx_path, bin_path = Path(stem + ".idx"), Path(stem + ".bin")
    missing = [f"{path}: no such file" for path in (idx_path, bin_path) if not path.is_file()]
    if missing:
        return Verification(tuple(missing))
    try:
        index = TokenIndex.open(idx_path)
    except DataError as error:
        return Verification(error.problems)
    problems = [*index.size_problems(bin_path), *index_problems(index)]
    wrong = _Places(f"{bin_path}: " + _id_rule(vocab_size))
    largest: int | None = None
    start = 0
    for ids in read_ids(bin_path, index.header.dtype):
        largest = int(ids.max()) if largest is None else max(largest, int(ids.max()))
        outside = ids < 0
        if vocab_size is not None:
            outside |= ids >= vocab_size
        for i in _find(outside, wrong):
            place = f"token {start + i} is {ids[i]}"
            wrong.named.append(place if problems else place + _sequence_of(index, start + i))
        start += len(ids)
    problems += wrong.messages()
    return Verification(tuple(problems), max(index.header.marks - 1, 0), start, largest)


def _id_rule(vocab_size: int | None) -> str:
    if vocab_size is None:
        return "an id below 0"
    return f"an id outside the vocabulary of {vocab_size} ids"


def _sequence_of(index: TokenIndex, token: int) -> str:
    offset = token * index.header.dtype.itemsize
    # Not numpy's search, which would copy the whole index: it lies at odd addresses of the file.
    return f", in sequence {bisect_right(index.pointers, offset) - 1}"


def read_ids(path: Path, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The ids of a `.bin` in pieces; read, not mapped, so that only one piece is in memory."""
    with path.open("rb") as file:
        while len(ids := np.fromfile(file, dtype, _TOKENS_AT_ONCE)):
            yield ids
