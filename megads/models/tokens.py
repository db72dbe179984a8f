"""The order of tokens in a stage's `[tokens, width]` activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """Maps between matrices of tokens and `[seq, batch, ...]`.

    Activations, between stages too, are contiguous matrices. Under sequence parallelism the rows go
    through the sequence first, so that ranks hold runs of positions; otherwise (`batch_first`)
    each sequence's rows are together, the order in which attention kernels write, and nothing has
    to be transposed.
    """

    seq: int
    batch: int
    batch_first: bool

    def flatten_ids(self, ids: Tensor) -> Tensor:
        """`[batch, seq]` -> `[tokens]`."""
        return (ids if self.batch_first else ids.t()).reshape(-1)

    def unflatten(self, x: Tensor) -> Tensor:
        """`[tokens, ...]` of the whole sequence or of a run of it -> a `[seq, batch, ...]` view."""
        if self.batch_first:
            return x.view(self.batch, -1, *x.shape[1:]).transpose(0, 1)
        return x.view(-1, self.batch, *x.shape[1:])

    def flatten(self, x: Tensor) -> Tensor:
        """`[seq, batch, width]` -> `[tokens, width]`; a view when the memory is in this order."""
        return (x.transpose(0, 1) if self.batch_first else x).reshape(-1, x.shape[-1])

    def repeat(self, table: Tensor) -> Tensor:
        """`[seq, width]`, a row per position -> `[tokens, width]`."""
        dim = 0 if self.batch_first else 1
        return (
            table.unsqueeze(dim)
            .expand(*((self.batch, -1) if self.batch_first else (-1, self.batch)), -1)
            .reshape(-1, table.shape[-1])
        )

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        """`x` `[tokens, width]` plus a row of `table` per position."""
        shape = (self.batch, -1, x.shape[-1]) if self.batch_first else (-1, self.batch, x.shape[-1])
        rows = table if self.batch_first else table[:, None]
        return (x.view(shape) + rows).view(x.shape)
