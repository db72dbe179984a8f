"""One split of a token file as samples, and what the file is known by. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from megads.data.documents import document_starts
from megads.data.indexed import IndexedTokens
from megads.data.plan import PlannedSource
from megads.data.sampler import Ids, cut_for_validation, num_samples

Split = Literal["train", "valid"]
PROBES, PROBE_BYTES = 16, 4096
"""Evenly spaced pieces of a file, the first and the last bytes among them."""


@dataclass(frozen=True)
class TokenSource:
    """The tokens `[start, stop)` of a file, cut into samples of seq_length + 1 tokens."""

    file: IndexedTokens
    start: int
    stop: int
    seq_length: int

    @classmethod
    def open(
        cls, prefix: str, seq_length: int, *, split: Split, valid_fraction: float
    ) -> TokenSource:
        """One split of a file; see `cut_for_validation` for where the file is cut."""
        file = IndexedTokens(prefix)
        cut = cut_for_validation(
            file.num_tokens, file.num_documents, file.document_start, valid_fraction
        )
        start, stop = (0, cut) if split == "train" else (cut, file.num_tokens)
        return cls(file, start, stop, seq_length)

    @property
    def num_samples(self) -> int:
        return num_samples(self.stop - self.start, self.seq_length)

    @cached_property
    def _windows(self) -> NDArray[Any]:
        """Every run of seq_length + 1 tokens of the file: a view, nothing is read."""
        return sliding_window_view(self.file.tokens, self.seq_length + 1)

    def read(self, sample: int) -> NDArray[np.int64]:
        """The sample's seq_length + 1 token ids."""
        return self.read_many(np.asarray([sample]))[0].astype(np.int64)

    def read_many(self, samples: Ids) -> NDArray[Any]:
        """Token ids of these samples in the file's number type, `[samples, seq_length + 1]`."""
        rows: NDArray[Any] = self._windows[self.start + samples * self.seq_length]
        return rows

    def document_starts(self, sample: int) -> NDArray[np.int64]:
        """Where in the sample the document of each of its seq_length + 1 tokens begins."""
        first = self.start + sample * self.seq_length
        return document_starts(self.file, first, self.seq_length + 1)

    def planned(self, seed: int) -> PlannedSource:
        """The source in a data plan: known by what it holds, so that files may move."""
        name = Path(self.file.prefix).name
        return PlannedSource.make(name, self.identity, self.num_samples, seed)

    @cached_property
    def identity(self) -> str:
        """A digest of the files' sizes and pieces, number type, token range and sample length."""
        digest = hashlib.blake2b(digest_size=16)
        shape = (self.file.dtype.str, self.start, self.stop, self.seq_length)
        digest.update(repr(shape).encode())
        for path in (self.file.idx_path, self.file.bin_path):
            digest.update(f" {path.stat().st_size} ".encode())
            for piece in _pieces(path):
                digest.update(piece)
        return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        last = max(0, path.stat().st_size - PROBE_BYTES)
        for number in range(PROBES):
            file.seek(last * number // (PROBES - 1))
            yield file.read(PROBE_BYTES)
