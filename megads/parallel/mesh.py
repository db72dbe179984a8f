"""The layout made real: process groups along every axis, created once, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megads.parallel.layout import AxisName, Coords, ParallelLayout
from megads.parallel.phases import Phases


@dataclass(frozen=True)
class Axis:
    """This rank's place on one axis of the mesh.

    `ranks` are the global ranks of the group in axis order; `group` is None when the axis has
    size 1, and no collective is ever issued then. `phases` takes the time of its collectives.
    """

    name: str
    size: int = 1
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)


@dataclass(frozen=True)
class Neighbour:
    """One direction of the link to an adjacent pipeline stage, with its own communicator."""

    peer: int
    group: dist.ProcessGroup
    phases: Phases = field(default_factory=Phases, compare=False, repr=False)


@dataclass(frozen=True)
class PipelineLinks:
    """Links of one stage, on the ring of stages (interleaving wraps around) or the row of them.

    Activations flow from a stage to the next, gradients back; each direction of each pair has its
    own communicator, so that a send and a receive between two stages never wait for each other.
    """

    activation_in: Neighbour | None = None
    activation_out: Neighbour | None = None
    gradient_in: Neighbour | None = None
    gradient_out: Neighbour | None = None


@dataclass(frozen=True)
class Mesh:
    """Everything about where this rank is and whom it talks to.

    The dp axis is cut in two for ZeRO: `shard` are the ranks over which model states are cut up,
    `replica` those that hold the same shard. `kv`: tensor-parallel peers holding copies of the same
    KV heads (size 1 unless there are fewer KV heads than tp ranks). `tied`: the first and last
    pipeline stage at this (dp, tp) position, on those stages and with pp > 1. `world`: all ranks
    of the layout. `saving`: the same ranks on the host, for the thread that writes checkpoints.
    `phases`: what this rank is doing, shared by all axes but `saving`.
    """

    layout: ParallelLayout
    coords: Coords
    tp: Axis
    pp: Axis
    dp: Axis
    shard: Axis
    replica: Axis
    kv: Axis
    tied: Axis
    world: Axis
    saving: Axis
    links: PipelineLinks
    device: torch.device
    phases: Phases = field(compare=False, repr=False)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """The mesh of one process; needs no process group."""
        layout, one = ParallelLayout(), Axis
        return cls(
            layout,
            layout.coords(0),
            one("tp"),
            one("pp"),
            one("dp"),
            one("shard"),
            one("replica"),
            one("kv"),
            one("tied"),
            one("world"),
            one("saving"),
            PipelineLinks(),
            torch.device(device),
            Phases(device),
        )

    @classmethod
    def build(
        cls,
        layout: ParallelLayout,
        rank: int,
        *,
        num_kv_heads: int | None = None,
        zero_shard_size: int = 1,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
        ring: bool = True,
    ) -> Mesh:
        """Create all groups of `layout` on an initialized process group.

        Axes of the same ranks share one: even an idle group costs memory (NCCL) or threads (gloo).
        Collective over the default group, whose first `layout.world_size` ranks form the mesh;
        ranks outside the mesh must not call it. `zero_shard_size` neighbours on the dp axis (which
        it divides) form a shard group: 1 under ZeRO stage 0, else usually all of them. A collective
        that waits longer than `timeout_s` ends the job. `ring`: the last stage sends to the first,
        as interleaved schedules need.
        """
        if layout.world_size == 1:
            return cls.single(device)
        coords = layout.coords(rank)
        limit = timedelta(seconds=timeout_s)
        made: Groups = {}
        phases = Phases(device)

        def axis(name: str, groups: list[tuple[int, ...]]) -> Axis:
            mine, group = _join(groups, rank, limit, made)
            return Axis(name, len(mine), mine.index(rank), mine, group, phases)

        def along(name: AxisName) -> Axis:
            return axis(name, layout.groups(name))

        tp, pp, dp = along("tp"), along("pp"), along("dp")
        shard, replica = _cut(dp, zero_shard_size, layout.groups("dp"), axis)
        kv = axis("kv", layout.kv_groups(num_kv_heads or layout.tp))
        tied = axis("tied", _tied_groups(layout))
        everyone = [tuple(range(layout.world_size))]
        world = axis("world", everyone)
        saving = replace(
            world,
            name="saving",
            group=dist.new_group(timeout=limit, backend="gloo", ranks=everyone[0]),
            phases=Phases(),
        )
        at = torch.device(device)
        links = _pipeline_links(layout, rank, phases, at, limit, ring=ring)
        axes = (tp, pp, dp, shard, replica, kv, tied, world, saving)
        return cls(layout, coords, *axes, links, at, phases)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that `build` made and this rank is in, in the order in which all made them."""
        links = vars(self.links).values()
        axes = (self.tp, self.pp, self.dp, self.shard, self.replica, self.kv, self.tied)
        found = [a.group for a in (*axes, self.world, self.saving)]
        found += [link.group for link in links if link is not None]
        unique = {group for group in found if group is not None}
        return sorted(unique, key=lambda g: (len(g.group_name), g.group_name))  # a counter's

    def close(self) -> None:
        """Destroy the groups. All ranks, once nothing is under way any more.

        NCCL waits for the others of a group: of the links of a ring, in an order of each rank's
        own, all would wait for each other.
        """
        for group in self.groups:
            dist.destroy_process_group(group)

    @property
    def is_last_stage(self) -> bool:
        return self.pp.index == self.pp.size - 1


Groups = dict[tuple[int, ...], dist.ProcessGroup]
"""By their ranks, also those that this rank is not in."""


def _join(
    groups: list[tuple[int, ...]], rank: int, timeout: timedelta, made: Groups
) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """Create the groups not `made` yet, in one order on all ranks; mine, with its ranks.

    A rank in none of the groups is on its own, and so is one in a group of one member.
    """
    for ranks in groups:
        if len(ranks) > 1 and ranks not in made:
            # Without a timeout here a group has torch's default, not the default group's.
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
    mine = next((ranks for ranks in groups if rank in ranks), (rank,))
    return mine, made.get(mine)


def _cut(
    dp: Axis,
    size: int,
    dp_groups: list[tuple[int, ...]],
    make: Callable[[str, list[tuple[int, ...]]], Axis],
) -> tuple[Axis, Axis]:
    """The shard and replica axes: runs of `size` dp neighbours, and the ranks alike in all runs."""
    if dp.size % size:
        raise ValueError(f"zero_shard_size {size} does not divide dp {dp.size}")
    alone = Axis("", ranks=(dp.ranks[dp.index],))
    if size == 1:
        return replace(alone, name="shard"), replace(dp, name="replica")
    if size == dp.size:
        return replace(dp, name="shard"), replace(alone, name="replica")
    runs = [g[i : i + size] for g in dp_groups for i in range(0, len(g), size)]
    alike = [g[i::size] for g in dp_groups for i in range(size)]
    return make("shard", runs), make("replica", alike)


def _tied_groups(layout: ParallelLayout) -> list[tuple[int, ...]]:
    if layout.pp == 1:
        return []
    return [(stages[0], stages[-1]) for stages in layout.groups("pp")]


def _pipeline_links(
    layout: ParallelLayout,
    rank: int,
    phases: Phases,
    device: torch.device,
    timeout: timedelta,
    *,
    ring: bool,
) -> PipelineLinks:
    """Two groups per adjacent pair of the ring, or row, of stages: activations and gradients.

    Each link carries one element at once, in an order that all ranks share: NCCL connects two
    ranks at their first message and blocks the host meanwhile, which in the order of a pipeline
    schedule could wait for ever.
    """
    if layout.pp == 1:
        return PipelineLinks()
    ends: dict[str, Neighbour] = {}
    for stages in layout.groups("pp"):
        for stage, here in enumerate(stages if ring else stages[:-1]):
            after = stages[(stage + 1) % len(stages)]
            for kind, source, target in (("activation", here, after), ("gradient", after, here)):
                group = dist.new_group([here, after], timeout=timeout)
                if rank not in (here, after):
                    continue
                first = torch.zeros(1, device=device)
                if rank == source:
                    ends[f"{kind}_out"] = Neighbour(target, group, phases)
                    dist.send(first, target, group=group)
                else:
                    ends[f"{kind}_in"] = Neighbour(source, group, phases)
                    dist.recv(first, source, group=group)
    return PipelineLinks(**ends)
