"""Text files to token files: what `megads-preprocess` does.

Inputs, in the order given, each read as UTF-8:

- `.jsonl` (or `.json`): one JSON object a line, its text under one key. Lines of white space are
  passed over. A line that is not an object, lacks the key or holds no string there is an error
  that names file and line.
- anything else is plain text: documents are what lies between form feeds (page breaks), or between
  occurrences of `split_on`; a file without any is one document. Line ends are kept as they are.
- either with `.gz` after it.

A document that yields no token is left out, with and without end-of-document ids, and counted. The
output depends on the inputs, the tokenizer and the options only, not on the number of workers.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megads.data.indexed import TokenWriter, dtype_for_vocab
from megads.data.tokenizer import Tokenizer, load_tokenizer, require_eod
from megads.errors import DataError

FORM_FEED = "\f"
_CHUNK = 64
_CHUNKS_AHEAD = 4


@dataclass(frozen=True)
class PreprocessStats:
    """What was written. `tokens` x the size of `dtype` is the size of the .bin file."""

    documents: int
    """Documents written; `empty` ones are not among them."""
    empty: int
    tokens: int
    """Tokens written, end-of-document ids included."""
    longest: int
    dtype: str
    vocab_size: int
    """Of the tokenizer, added tokens included."""


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    tokenizer_spec: str,
    *,
    json_key: str = "text",
    append_eod: bool = True,
    split_on: str = FORM_FEED,
    workers: int = 1,
) -> PreprocessStats:
    """Tokenize `inputs` into `<output_prefix>.bin` and `.idx`.

    Raises DataError for unreadable input or a tokenizer without an end-of-document token when one
    is to be appended; nothing is left behind then.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    eod = require_eod(tokenizer) if append_eod else None
    for path in inputs:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    texts = (text for path in inputs for text in read_documents(path, json_key, split_on))
    documents = empty = longest = 0
    with TokenWriter(output_prefix, dtype_for_vocab(tokenizer.vocab_size)) as writer:
        for ids in _encode_all(texts, tokenizer_spec, tokenizer, workers):
            if len(ids) == 0:
                empty += 1
                continue
            writer.add_document(ids if eod is None else np.append(ids, eod))
            documents += 1
            longest = max(longest, len(ids) + (eod is not None))
        tokens, dtype = writer.num_tokens, writer.dtype.name
    return PreprocessStats(documents, empty, tokens, longest, dtype, tokenizer.vocab_size)


def read_documents(path: Path, json_key: str, split_on: str) -> Iterator[str]:
    """The texts of one input file; see the module's description. Raises DataError."""
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    if inner.suffix in (".jsonl", ".json"):
        return _read_jsonl(path, json_key)
    return _read_text(path, split_on)


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _read_text(path: Path, split_on: str) -> Iterator[str]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start}") from error
    yield from text.split(split_on)


def _read_jsonl(path: Path, json_key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number}: expected an object with the key {json_key!r}, found "
                f"{type(record).__name__}"
            )
        if json_key not in record:
            raise DataError(
                f"{path}, line {number}: no key {json_key!r}; the line has {sorted(record)}"
            )
        text = record[json_key]
        if not isinstance(text, str):
            raise DataError(
                f"{path}, line {number}: {json_key!r} must be a string, found {type(text).__name__}"
            )
        yield text if b"\\ud" not in line.lower() else _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    """JSON can escape half a surrogate pair, which no encoding can hold: it becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode_all(
    texts: Iterable[str], spec: str, tokenizer: Tokenizer, workers: int
) -> Iterator[NDArray[np.int64]]:
    if workers <= 1:
        for text in texts:
            yield np.asarray(tokenizer.encode(text), dtype=np.int64)
        return
    encode = partial(_encode_chunk, spec)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending: deque[Future[list[NDArray[np.int64]]]] = deque()
        source = iter(texts)
        while chunk := list(islice(source, _CHUNK)):
            pending.append(pool.submit(encode, chunk))
            if len(pending) > workers * _CHUNKS_AHEAD:  # bounds the memory, keeps the order
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def _encode_chunk(spec: str, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    tokenizer = _tokenizer_of_worker(spec)
    return [np.asarray(tokenizer.encode(text), dtype=np.int64) for text in texts]


@lru_cache(maxsize=1)
def _tokenizer_of_worker(spec: str) -> Tokenizer:
    return load_tokenizer(spec)
