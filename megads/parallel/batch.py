"""What one microbatch brings to the stages that read tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class MicroBatch:
    """Tokens and targets of one microbatch on one data-parallel rank.

    `tokens`, `labels`: int64 `[batch, seq]`. `loss_mask`: float32 `[batch, seq]` or None when
    every position counts. `index` identifies the microbatch within the global step (dp rank and
    position), and seeds dropout. `document_starts`: int64 `[batch, seq]`, where in its sequence the
    document of each token begins, 0 for one that began before; attention and positions then stay
    inside documents, on every stage. None: nothing ends at a document's end.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    index: int = 0
    document_starts: Tensor | None = None
