"""Which document each token of a sample belongs to, read from the index and never from the tokens.

An end-of-document token inside a text, or a file without such tokens, changes nothing here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from megads.data.indexed import IndexedTokens


def document_starts(file: IndexedTokens, first: int, count: int) -> NDArray[np.int64]:
    """For each of the tokens `[first, first + count)` of a file, where its document begins.

    `[count]`, counted from `first`; 0 for the document that the first token belongs to, wherever
    it began.
    """
    starts = np.zeros(count, dtype=np.int64)
    begins = _beginnings(file, first, first + count) - first
    starts[begins] = begins
    return np.maximum.accumulate(starts)


def _beginnings(file: IndexedTokens, after: int, stop: int) -> NDArray[np.int64]:
    """Places of the file in `(after, stop)` at which documents begin; empty ones share theirs."""
    item, pointers, bounds = file.dtype.itemsize, file.pointers, file.document_bounds
    # Not numpy's search, which copies the whole index first: it lies at odd addresses of the file.
    low = bisect_right(pointers, after * item)
    high = bisect_left(pointers, stop * item, low)
    documents = slice(bisect_left(bounds, low), bisect_left(bounds, high))
    return pointers[bounds[documents]] // item


def loss_weights(starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """1 where the next token is of the same document, else 0.

    `starts`: `[..., seq + 1]` from `document_starts`; `[..., seq]` out, one for each label.
    """
    return (starts[..., 1:] == starts[..., :-1]).astype(np.float32)
