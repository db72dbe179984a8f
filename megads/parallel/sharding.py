"""`ParamSpec`: what a parameter is, apart from any layout, and which part of it a rank holds.

Pure: no torch. Optimizer groups, initialization, clipping, checkpoints and conversion all derive
from these specs. Boxes are half-open hyper-rectangles of the global tensor.

The global ("canonical") tensor of a fused projection is the plain concatenation of its parts along
dim 0: `[all q heads; all k heads; all v heads]`, `[gate; up]`. A tensor-parallel rank holds its
share of each part, concatenated in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "norm", "bias", "embedding"]
Edge = Literal["first", "last"]
TpGradient = Literal["sharded", "identical", "partial_if_sequence_parallel", "partial"]


@dataclass(frozen=True)
class Part:
    """One section of a fused tensor along its tp dim.

    `units` indivisible groups (heads, or single rows) of `unit_size` rows each. A part with fewer
    units than tp ranks is replicated: each unit is held by tp / units neighbouring ranks.
    """

    name: str
    units: int
    unit_size: int = 1

    @property
    def size(self) -> int:
        return self.units * self.unit_size

    def copies(self, tp: int) -> int:
        """How many tensor-parallel ranks hold each unit."""
        if self.units >= tp:
            if self.units % tp:
                raise ValueError(f"{self.units} {self.name} units cannot be split over tp={tp}")
            return 1
        if tp % self.units:
            raise ValueError(f"tp={tp} is not a multiple of {self.units} {self.name} units")
        return tp // self.units

    def span(self, tp: int, index: int) -> tuple[int, int]:
        """Rows [start, stop) of this part that tensor-parallel rank `index` holds."""
        copies = self.copies(tp)
        per_rank = self.units * copies // tp
        first = index // copies * per_rank
        return first * self.unit_size, (first + per_rank) * self.unit_size


@dataclass(frozen=True)
class Init:
    """How a parameter starts."""

    kind: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """A parameter's identity.

    `shape` is global and unpadded. `tp_dim` is the dim split over tensor-parallel ranks (None:
    replicated). `parts` cuts that dim into fused sections; empty means one section of single rows.
    `pad_multiple` (vocabulary only): each rank's share of `tp_dim` is rounded up to a multiple of
    it, so that all ranks hold equally many rows; padding is zero and never leaves the rank.
    `tp_gradient` says what a rank's gradient of this parameter is after backward: its own shard's
    ("sharded"), the same on all tp ranks ("identical"), or a summand ("partial").
    `layer` is the global block index, or None; `edge` places the parameters outside the blocks.
    `tied`: the first and the last stage both hold it, each with a summand of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init: Init
    tp_dim: int | None = None
    parts: tuple[Part, ...] = ()
    pad_multiple: int | None = None
    tp_gradient: TpGradient = "identical"
    layer: int | None = None
    edge: Edge | None = None
    tied: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel rank's piece, padding included."""
        if self.tp_dim is None:
            return self.shape
        shape = list(self.shape)
        if self.pad_multiple:
            share = -(-shape[self.tp_dim] // tp)
            shape[self.tp_dim] = -(-share // self.pad_multiple) * self.pad_multiple
        else:
            shape[self.tp_dim] = sum(s.length for s in self.slabs(tp, 0))
        return tuple(shape)

    def slabs(self, tp: int, index: int) -> tuple[Slab, ...]:
        """The runs of the tp dim that rank `index` holds, in local order; padding left out."""
        if self.tp_dim is None:
            raise ValueError(f"{self.name} is replicated and has no slabs")
        size = self.shape[self.tp_dim]
        if self.pad_multiple:
            share = self.local_shape(tp)[self.tp_dim]
            start, stop = min(index * share, size), min((index + 1) * share, size)
            return (Slab(start, 0, stop - start, 1),)
        slabs, base, local = [], 0, 0
        for part in self.parts or (Part("row", size),):
            start, stop = part.span(tp, index)
            slabs.append(Slab(base + start, local, stop - start, part.copies(tp)))
            base, local = base + part.size, local + stop - start
        return tuple(slabs)

    def has_copies(self, tp: int) -> bool:
        """Whether some rows (KV heads) are held by several tensor-parallel ranks."""
        return self.tp_dim is not None and any(s.copies > 1 for s in self.slabs(tp, 0))


@dataclass(frozen=True)
class Slab:
    """A run of `length` indices along the tp dim: global start, local start, ranks holding it."""

    start: int
    local_start: int
    length: int
    copies: int


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a global tensor that lies contiguously in a rank's local tensor.

    The `numel` elements from `flat_start` of the flattened local tensor, viewed as `shape`, are
    `global[offset : offset + shape]`. `copy_index` is this rank's place among the tensor-parallel
    ranks that hold the same elements; 0 owns them wherever each element must count once.
    """

    flat_start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    copy_index: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def flat_range_boxes(
    spec: ParamSpec, tp: int, index: int, start: int = 0, stop: int | None = None
) -> Iterator[Box]:
    """Cut elements [start, stop) of rank `index`'s flattened local tensor into boxes.

    ZeRO owns flat ranges, checkpoints hold slices of global tensors; this is the bridge. A range
    of a matrix becomes at most a partial first row, whole rows, and a partial last row per slab.
    Padding is left out. Supports 1-D and 2-D tensors.
    """
    shape = spec.local_shape(tp)
    columns = shape[1] if len(shape) == 2 else 1
    stop = math.prod(shape) if stop is None else stop
    column_offset = copy_index = 0
    rows: tuple[Slab, ...]
    if spec.tp_dim is None:
        rows = (Slab(0, 0, shape[0], tp),)
        copy_index = index
    elif spec.tp_dim == 0:
        rows = spec.slabs(tp, index)
    else:
        (columns_slab,) = spec.slabs(tp, index)
        column_offset = columns_slab.start
        rows = (Slab(0, 0, shape[0], 1),)
    for slab in rows:
        if spec.tp_dim == 0:
            copy_index = index % slab.copies
        low = max(start, slab.local_start * columns)
        high = min(stop, (slab.local_start + slab.length) * columns)
        while low < high:
            row, column = divmod(low, columns)
            if column or high - low < columns:
                box_rows, box_columns = 1, min(columns - column, high - low)
            else:
                box_rows, box_columns = (high - low) // columns, columns
            global_row = row - slab.local_start + slab.start
            offset: tuple[int, ...] = (global_row,)
            extent: tuple[int, ...] = (box_rows,)
            if len(shape) == 2:
                offset, extent = (global_row, column_offset + column), (box_rows, box_columns)
            yield Box(low, offset, extent, copy_index)
            low += box_rows * box_columns
