"""Who writes which piece, and which parts of the pieces a wanted box is made of. Pure.

Both directions work on boxes of global tensors, so a checkpoint written under one layout is read
under any other: intersect what is stored with what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megads.checkpoint.manifest import ITEM_SIZES, TensorEntry
from megads.checkpoint.tiling import Extent, intersect, tiling_problem
from megads.errors import CheckpointError


class PieceInfo(NamedTuple):
    """A piece as the other ranks need to know it: everything but its values."""

    key: str
    dtype: str
    global_shape: Extent
    offset: Extent
    shape: Extent

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Read:
    """Copy `file[tensor][source]` to `target` of the wanted box."""

    file: str
    tensor: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def plan_reads(key: str, entry: TensorEntry, offset: Extent, shape: Extent) -> list[Read]:
    """The copies that fill the box `global[offset : offset + shape]` of tensor `key`.

    Raises CheckpointError, naming key and box, when the stored pieces do not cover the box.
    """
    if len(offset) != len(entry.shape) or len(shape) != len(entry.shape):
        raise CheckpointError(
            f"{key}: a box at {list(offset)} of shape {list(shape)} is wanted, but the stored "
            f"tensor has shape {list(entry.shape)}"
        )
    reads, covered = [], 0
    for piece in entry.pieces:
        common = intersect((piece.offset, piece.shape), (offset, shape))
        if common is None:
            continue
        covered += math.prod(common[1])
        reads.append(
            Read(
                piece.file,
                piece.tensor,
                _slices(common[0], common[1], piece.offset),
                _slices(common[0], common[1], offset),
            )
        )
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{key}: the checkpoint holds {covered} of the {math.prod(shape)} elements of the box "
            f"at {list(offset)} of shape {list(shape)}; the stored tensor has shape "
            f"{list(entry.shape)}"
        )
    return reads


def assign_writers(tables: Sequence[Sequence[PieceInfo]]) -> list[list[int]]:
    """Which of its pieces each rank writes, as indices into its table; each is written once.

    `tables[r]` lists what rank r holds. A piece that several ranks hold is given to the one with
    the fewest bytes so far, the largest pieces first. Deterministic: every rank computes the same.
    Raises CheckpointError when the pieces of a tensor disagree on its type or shape, or do not
    fill it exactly once copies of the same piece are left out.
    """
    holders: dict[PieceInfo, list[tuple[int, int]]] = {}
    for rank, table in enumerate(tables):
        for index, info in enumerate(table):
            holders.setdefault(info, []).append((rank, index))
    _check_complete(list(holders))
    load = [0] * len(tables)
    chosen: list[list[int]] = [[] for _ in tables]

    def give(info: PieceInfo, rank: int, index: int) -> None:
        load[rank] += info.nbytes
        chosen[rank].append(index)

    shared = []
    for info, places in holders.items():
        if len(places) == 1:
            give(info, *places[0])
        else:
            shared.append(info)
    for info in sorted(shared, key=lambda info: (-info.nbytes, info)):
        give(info, *min(holders[info], key=lambda place: (load[place[0]], place)))
    return [sorted(indices) for indices in chosen]


def _check_complete(pieces: Sequence[PieceInfo]) -> None:
    """Each key's pieces agree with one another and tile the key's tensor."""
    by_key: dict[str, list[PieceInfo]] = {}
    for info in pieces:
        by_key.setdefault(info.key, []).append(info)
    for key, infos in by_key.items():
        first = infos[0]
        for info in infos:
            if (info.dtype, info.global_shape) != (first.dtype, first.global_shape):
                raise CheckpointError(
                    f"{key}: one rank holds {first.dtype} {list(first.global_shape)}, another "
                    f"{info.dtype} {list(info.global_shape)}"
                )
        problem = tiling_problem(first.global_shape, [(i.offset, i.shape) for i in infos])
        if problem:
            raise CheckpointError(f"{key}: {problem}")


def _slices(offset: Extent, shape: Extent, origin: Extent) -> tuple[slice, ...]:
    """The box as slices of something that starts at `origin`."""
    return tuple(
        slice(low - base, low - base + length)
        for low, length, base in zip(offset, shape, origin, strict=True)
    )
