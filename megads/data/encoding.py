"""Chunks of text to packed ids, in this process or in several, always in the same order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.process import BaseProcess

import numpy as np

from megads.data.chunks import Chunk
from megads.data.token_format import MAX_SEQUENCE
from megads.data.tokenizer import Tokenizer, load_tokenizer
from megads.errors import DataError, WorkerFailure

_CHUNKS_AHEAD = 4


@dataclass(frozen=True)
class Encoding:
    """How texts become tokens: a tokenizer by name, the id after each document, the number type."""

    tokenizer: str
    eod: int | None
    dtype: str


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk, as they go into the files; empty ones are left out and counted."""

    tokens: bytes
    """Of all documents one after the other, in the output's number type."""
    lengths: bytes
    """Tokens of each document, int32."""
    documents: int
    empty: int
    longest: int
    unknown: int
    """How many of the ids are the tokenizer's unknown one."""


@dataclass(frozen=True)
class Finished:
    """A chunk's result and the sizes of the chunk; see `Chunk`."""

    encoded: Encoded
    size: int
    packed: int


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, encoding: Encoding) -> Encoded:
    """Read and tokenize one chunk.

    Raises DataError for text that cannot be read, a document longer than the format can say, or an
    id that the tokenizer's `vocab_size` denies.
    """
    parts = tokenizer.encode_batch(list(chunk.texts()))
    kept = [part for part in parts if len(part)]
    end = [] if encoding.eod is None else [np.array([encoding.eod], np.int32)]
    lengths = np.array([len(part) + len(end) for part in kept], np.int64)
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE:
        raise DataError(
            f"{chunk.where}: a document of {longest} tokens; the format holds at most "
            f"{MAX_SEQUENCE}. Split the document"
        )
    joined = np.concatenate([x for part in kept for x in (part, *end)] or [np.zeros(0, np.int32)])
    if len(joined) and not 0 <= joined.min() <= joined.max() < tokenizer.vocab_size:
        worst = int(joined.max() if joined.max() >= tokenizer.vocab_size else joined.min())
        raise DataError(
            f"{chunk.where}: tokenizer {tokenizer.name} gave the id {worst}, but says that it has "
            f"{tokenizer.vocab_size} ids"
        )
    return Encoded(
        joined.astype(encoding.dtype).tobytes(),
        lengths.astype("<i4").tobytes(),
        len(kept),
        len(parts) - len(kept),
        longest,
        0 if tokenizer.unknown is None else int(np.count_nonzero(joined == tokenizer.unknown)),
    )


def encode_all(
    chunks: Iterable[Chunk], encoding: Encoding, workers: int
) -> Generator[Finished, None, None]:
    """The chunks' results in the order of the chunks, from this process or from `workers` others.

    Raises what `encode_chunk` does, for the first chunk concerned, and WorkerFailure when a worker
    dies.
    """
    if workers <= 1:
        tokenizer = load_tokenizer(encoding.tokenizer)
        for chunk in chunks:
            yield Finished(encode_chunk(chunk, tokenizer, encoding), chunk.size, chunk.packed)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent)
    pending: deque[_Pending] = deque()
    try:
        for chunk in chunks:
            future = pool.submit(_encode_in_worker, chunk, encoding)
            pending.append(_Pending(future, chunk.size, chunk.packed))
            if len(pending) >= workers * _CHUNKS_AHEAD:  # bounds the memory, keeps the order
                yield pending.popleft().finished()
        while pending:
            yield pending.popleft().finished()
    except BrokenProcessPool as error:
        raise WorkerFailure(
            "a worker was killed, perhaps for lack of memory: use fewer workers. The same command "
            "continues where this one ended"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Pending:
    future: Future[Encoded]
    size: int
    packed: int

    def finished(self) -> Finished:
        return Finished(self.future.result(), self.size, self.packed)


def _encode_in_worker(chunk: Chunk, encoding: Encoding) -> Encoded:
    return encode_chunk(chunk, _tokenizer_of_worker(encoding.tokenizer), encoding)


@lru_cache(maxsize=1)
def _tokenizer_of_worker(spec: str) -> Tokenizer:
    return load_tokenizer(spec)


def _follow_parent() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(process: BaseProcess) -> None:
    process.join()
    os._exit(1)
