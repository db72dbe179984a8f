"""Text to token files: what `megads-preprocess` does.

What can be read is described in `megads.data.inputs`. A document that yields no token is left out,
with and without end-of-document ids, and counted. The output depends on the inputs, the tokenizer
and the options only, not on the number of workers, nor on how often the work was interrupted and
continued.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from megads.config.data_files import strip_suffix
from megads.data.chunks import CHUNK_BYTES, Input
from megads.data.encoding import Encoding, encode_all
from megads.data.indexed import dtype_for_vocab
from megads.data.inputs import open_input
from megads.data.tokenizer import load_tokenizer, require_eod, tokenizer_identity
from megads.data.unfinished import UnfinishedTokens
from megads.errors import DataError

FORM_FEED = "\f"
_COMMIT_SECONDS = 5.0


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
    unknown: int = 0
    """Tokens that are the tokenizer's unknown id."""
    input_bytes: int = field(default=0, compare=False)
    """Bytes of text read, unpacked."""
    bytes_continued: int = field(default=0, compare=False)
    """How many of them an earlier run that was interrupted had read."""
    seconds: float = field(default=0.0, compare=False)
    """From opening the inputs until the files were in place."""

    @property
    def bytes_per_second(self) -> float:
        """Rate of this run, without what was continued from."""
        return (self.input_bytes - self.bytes_continued) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    documents: int
    documents_per_second: float
    bytes_per_second: float
    fraction: float | None
    """Part of the inputs that is done; None when the size of one is not known."""
    seconds_left: float | None


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str,
    tokenizer_spec: str,
    *,
    json_key: str = "text",
    append_eod: bool = True,
    split_on: str = FORM_FEED,
    workers: int = 1,
    commit_every: float = _COMMIT_SECONDS,
    on_progress: Callable[[Progress], None] | None = None,
) -> PreprocessStats:
    """Tokenize `inputs` into `<output_prefix>.bin` and `.idx`.

    Until both are complete the work is kept in `<output_prefix>.partial`; after an interruption the
    same call continues there, losing `commit_every` seconds at most. `on_progress` is called after
    every chunk, a MiB of text.

    Raises DataError for unreadable input or a tokenizer without an end-of-document token when one
    is to be appended; nothing is left behind then.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(tokenizer_spec)
    eod = require_eod(tokenizer) if append_eod else None
    sources = [open_input(path, json_key, split_on) for path in inputs]
    dtype = dtype_for_vocab(tokenizer.vocab_size)
    encoding = Encoding(tokenizer_spec, eod, dtype.str)
    prefix = strip_suffix(output_prefix)
    job = _digest(sources, encoding, [json_key, split_on])
    output = UnfinishedTokens(prefix, dtype, job, commit_every)
    try:
        before = output.totals.size
        report = _Reporter(output, sources, on_progress)
        chunks = (chunk for source in sources for chunk in source.chunks())
        left = islice(chunks, output.totals.chunks, None)
        with closing(encode_all(left, encoding, workers)) as results:
            for finished in results:
                output.add(finished)
                report()
        output.publish()
    except DataError:
        output.discard()
        raise
    except BaseException:
        output.keep()
        raise
    totals = output.totals
    return PreprocessStats(
        documents=totals.documents,
        empty=totals.empty,
        tokens=totals.tokens,
        longest=totals.longest,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        unknown=totals.unknown,
        input_bytes=totals.size,
        bytes_continued=before,
        seconds=time.monotonic() - started,
    )


def read_documents(path: str | Path, json_key: str, split_on: str) -> Iterator[str]:
    """The texts of one input, as they are tokenized. Raises DataError."""
    for chunk in open_input(path, json_key, split_on).chunks():
        yield from chunk.texts()


def _digest(sources: Sequence[Input], encoding: Encoding, options: list[str]) -> str:
    """Of all that the output, and how the input is cut, depends on."""
    parts = {
        "inputs": [source.identity for source in sources],
        "encoding": asdict(encoding),
        "tokenizer": tokenizer_identity(encoding.tokenizer),
        "options": options,
        "chunk": CHUNK_BYTES,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class _Reporter:
    """Turns totals into rates since the start of this run."""

    def __init__(
        self,
        output: UnfinishedTokens,
        sources: Sequence[Input],
        tell: Callable[[Progress], None] | None,
    ) -> None:
        sizes = [source.size for source in sources]
        self._whole = None if None in sizes else sum(size or 0 for size in sizes)
        self._totals, self._tell, self._start = output.totals, tell, time.monotonic()
        self._documents = self._totals.documents + self._totals.empty
        self._size, self._packed = self._totals.size, self._totals.packed

    def __call__(self) -> None:
        if self._tell is None:
            return
        totals, seconds = self._totals, max(time.monotonic() - self._start, 1e-9)
        documents = totals.documents + totals.empty
        fraction = left = None
        if self._whole is not None:
            fraction = min(1.0, totals.packed / max(self._whole, 1))
            rate = (totals.packed - self._packed) / seconds
            left = max(0, self._whole - totals.packed) / rate if rate else None
        self._tell(
            Progress(
                documents,
                (documents - self._documents) / seconds,
                (totals.size - self._size) / seconds,
                fraction,
                left,
            )
        )
