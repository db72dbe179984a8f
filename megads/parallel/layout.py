"""Rank arithmetic of a parallel layout. Pure: no torch, no processes.

Ranks are numbered with tp innermost, then dp, then pp outermost: tensor-parallel peers, which talk
most, are neighbours inside a node; pipeline stages, which talk least, are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

AxisName = Literal["pp", "dp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "tp")


class Coords(NamedTuple):
    """Position of a rank on each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the three axes; axis order, outer to inner, is pp, dp, tp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coords(self, rank: int) -> Coords:
        """Position of global rank `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return Coords(
            pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp, tp=rank % self.tp
        )

    def rank(self, coords: Coords) -> int:
        """Global rank at a position; the inverse of `coords`."""
        return (coords.pp * self.dp + coords.dp) * self.tp + coords.tp

    def groups(self, *axes: AxisName) -> list[tuple[int, ...]]:
        """Partition of all ranks into groups that differ only along `axes`, each in rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coords(rank)._asdict()
            groups.setdefault(tuple(v for k, v in position.items() if k not in axes), []).append(
                rank
            )
        return [tuple(group) for group in groups.values()]

    def kv_groups(self, num_kv_heads: int) -> list[tuple[int, ...]]:
        """Groups of tensor-parallel peers that hold a copy of the same KV head.

        With fewer KV heads than tp ranks each head is held by tp / num_kv_heads neighbours;
        otherwise every rank is alone in its group.
        """
        copies = max(1, self.tp // num_kv_heads)
        return [
            group[i : i + copies] for group in self.groups("tp") for i in range(0, self.tp, copies)
        ]


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: gbs = micro_batch_size x num_microbatches x dp."""

    micro_batch_size: int
    num_microbatches: int
    dp: int
    seq_length: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.dp
