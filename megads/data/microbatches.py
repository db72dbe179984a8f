"""From rows of token ids to the microbatches of a rank, in memory and then on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megads.data.documents import loss_weights
from megads.parallel.batch import MicroBatch


@dataclass(frozen=True)
class Rows:
    """Samples of one rank: token ids `[rows, seq + 1]`, where their documents start (the same
    shape, or None for no document mask), and which rows count in the loss (`[rows]`, None: all)."""

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64] | None
    counts: NDArray[np.bool_] | None = None


def cut_rows(rows: Rows, size: int, *, first: int, pin: bool) -> list[MicroBatch]:
    """Microbatches of `size` rows each, numbered from `first`, in pinned memory with `pin`."""
    result = []
    for at in range(0, len(rows.tokens), size):
        here = slice(at, at + size)
        ids = rows.tokens[here]
        starts = None if rows.starts is None else rows.starts[here]
        counts = None if rows.counts is None else rows.counts[here]
        mask = None
        if counts is not None and not counts.all():
            mask = np.repeat(counts.astype(np.float32)[:, None], ids.shape[1] - 1, axis=1)
        if starts is not None:
            inside = loss_weights(starts)
            mask = inside if mask is None else mask * inside
        result.append(
            MicroBatch(
                tokens=_held(ids[:, :-1], pin=pin),
                labels=_held(ids[:, 1:], pin=pin),
                loss_mask=None if mask is None else _held(mask, pin=pin),
                index=first + at // size,
                document_starts=None if starts is None else _held(starts[:, :-1], pin=pin),
            )
        )
    return result


def placed(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The microbatch on a device, where the copies are queued before what will use them."""
    if device.type == "cpu":
        return batch
    mask, starts = batch.loss_mask, batch.document_starts
    return replace(
        batch,
        tokens=batch.tokens.to(device, non_blocking=True),
        labels=batch.labels.to(device, non_blocking=True),
        loss_mask=None if mask is None else mask.to(device, non_blocking=True),
        document_starts=None if starts is None else starts.to(device, non_blocking=True),
    )


def _held(values: NDArray[Any], *, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if pin else tensor
