"""Several token files into one, their documents one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megads.config.data_files import strip_suffix
from megads.data.indexed import IndexedTokens
from megads.data.inspection import index_problems, read_ids
from megads.data.token_format import Header, PendingPair, chunks, sync_and_close, write_index
from megads.errors import DataError


@dataclass(frozen=True)
class MergeStats:
    """What was written."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    widened: tuple[str, ...]
    """Inputs whose ids were stored in a narrower number type."""


def merge(inputs: Sequence[str], output: str) -> MergeStats:
    """Write the documents of all inputs, in this order, into one token file.

    An input may be named more than once. Ids are stored in the narrowest type that holds those of
    all inputs with any token. The same bytes as if every document had been added to one writer;
    the files appear when they are complete. Memory does not grow with the inputs, but for pages of
    their mapped indices, which the system takes back when it needs them.

    Raises DataError for an output that is also an input and for damaged inputs, whose indices are
    read completely; nothing is left behind then.
    """
    if not inputs:
        raise DataError("nothing to merge: name at least one token file")
    stem = strip_suffix(output)
    files = [IndexedTokens(prefix) for prefix in inputs]
    problems = [*_overwritten(files, stem)]
    for file in {file.prefix: file for file in files}.values():
        problems += index_problems(file.index)
    if problems:
        raise DataError(problems)
    header = Header(
        dtype=_common_type(files),
        sequences=sum(file.num_sequences for file in files),
        marks=sum(file.num_documents for file in files) + 1,
    )
    pair = PendingPair(stem)
    try:
        with pair.bin.open("wb") as out:
            for file in files:
                for ids in read_ids(file.bin_path, file.dtype):
                    out.write(ids.astype(header.dtype, copy=False).data)
            sync_and_close(out)
        write_index(pair.idx, header, partial(_sizes, files), _bounds(files))
        pair.publish()
    finally:
        pair.discard()
    return MergeStats(
        documents=header.marks - 1,
        sequences=header.sequences,
        tokens=sum(file.num_tokens for file in files),
        dtype=header.dtype.name,
        widened=tuple(
            file.prefix for file in files if file.num_tokens and file.dtype != header.dtype
        ),
    )


def _overwritten(files: Sequence[IndexedTokens], stem: str) -> Iterator[str]:
    for suffix in (".bin", ".idx"):
        target = Path(stem + suffix)
        for file in files:
            if target.exists() and target.samefile(file.prefix + suffix):
                yield f"{target}: is an input and the output; choose another output"
                break


def _common_type(files: Sequence[IndexedTokens]) -> np.dtype[Any]:
    """Types of unequal signs widen to one that holds both, which the format has up to int64."""
    types = [file.dtype for file in files if file.num_tokens] or [file.dtype for file in files]
    return np.result_type(*types)


def _sizes(files: Sequence[IndexedTokens]) -> Iterator[NDArray[Any]]:
    for file in files:
        yield from chunks(file.sizes)


def _bounds(files: Sequence[IndexedTokens]) -> Iterator[NDArray[Any]]:
    yield np.zeros(1, dtype=np.int64)
    before = 0
    for file in files:
        for piece in chunks(file.document_bounds[1:]):
            yield before + piece
        before += file.num_sequences
