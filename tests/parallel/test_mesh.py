"""Every group of a mesh joins the ranks it should, found by summing ranks over it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from megads.parallel import collectives
from megads.parallel.layout import Coords, ParallelLayout
from megads.parallel.mesh import Mesh, PipelineLinks
from tests.distributed import Workers, mesh_for

AXES = ("tp", "pp", "dp", "kv", "tied", "world")
LAYOUTS = {
    2: [ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)],
    4: [
        ParallelLayout(tp=4),
        ParallelLayout(pp=4),
        ParallelLayout(tp=2, dp=2),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(pp=2, dp=2),
    ],
}
CASES = [(world, layout) for world, layouts in LAYOUTS.items() for layout in layouts]
IDS = [f"tp{layout.tp}pp{layout.pp}dp{layout.dp}" for _, layout in CASES]


class Seen(NamedTuple):
    """One axis as a rank sees it: members, its place, and the sum of 10**rank over the axis."""

    ranks: tuple[int, ...]
    size: int
    index: int
    total: int


def seen(rank: int, world: int, layout: ParallelLayout, kv_heads: int | None) -> dict[str, Seen]:
    mesh = mesh_for(layout, rank, kv_heads)
    result = {}
    for name in AXES:
        axis = getattr(mesh, name)
        total = collectives.all_reduce(torch.tensor(10**rank), axis)
        assert (axis.group is None) == (axis.size == 1)
        result[name] = Seen(axis.ranks, axis.size, axis.index, int(total))
    assert mesh.is_last_stage == (mesh.coords.pp == layout.pp - 1)
    return result


def expected(layout: ParallelLayout, kv_heads: int | None) -> list[dict[str, Seen]]:
    """The same from positions enumerated with tp fastest and pp slowest."""
    places = list(itertools.product(range(layout.pp), range(layout.dp), range(layout.tp)))
    heads = kv_heads or layout.tp
    answer = []
    for rank, (pp, dp, tp) in enumerate(places):
        members = {
            "tp": [r for r, (p, d, _) in enumerate(places) if (p, d) == (pp, dp)],
            "pp": [r for r, (_, d, t) in enumerate(places) if (d, t) == (dp, tp)],
            "dp": [r for r, (p, _, t) in enumerate(places) if (p, t) == (pp, tp)],
            "kv": [
                r
                for r, (p, d, t) in enumerate(places)
                if (p, d, t * heads // layout.tp) == (pp, dp, tp * heads // layout.tp)
            ],
            "tied": [
                r
                for r, (p, d, t) in enumerate(places)
                if (d, t) == (dp, tp) and {p, pp} <= {0, layout.pp - 1}
            ]
            or [rank],
            "world": list(range(len(places))),
        }
        answer.append(
            {
                name: Seen(tuple(ranks), len(ranks), ranks.index(rank), sum(10**r for r in ranks))
                for name, ranks in members.items()
            }
        )
    return answer


@pytest.mark.parametrize("world, layout", CASES, ids=IDS)
def test_every_axis_joins_the_ranks_it_should(
    workers: Workers, world: int, layout: ParallelLayout
) -> None:
    assert workers(world).run(seen, layout, None) == expected(layout, None)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_ranks_that_hold_one_kv_head_form_a_group(workers: Workers, kv_heads: int) -> None:
    layout = ParallelLayout(tp=4)
    results = workers(4).run(seen, layout, kv_heads)
    assert results == expected(layout, kv_heads)
    assert results[3]["kv"].size == {1: 4, 2: 2, 8: 1}[kv_heads]


class DataInnermost(ParallelLayout):
    """dp and tp swapped: the same sizes, other neighbours."""

    def coords(self, rank: int) -> Coords:
        return Coords(rank // (self.dp * self.tp), rank % self.dp, rank // self.dp % self.tp)


def test_negative_control_another_order_of_axes_is_noticed(workers: Workers) -> None:
    layout = DataInnermost(tp=2, dp=2)
    wrong, right = workers(4).run(seen, layout, None), expected(layout, None)
    assert [rank["tp"] for rank in wrong] == [rank["dp"] for rank in right]
    assert [rank["tp"] for rank in wrong] != [rank["tp"] for rank in right]


def exchange(rank: int, world: int, layout: ParallelLayout) -> list[int]:
    """What arrives over [activation_in, gradient_in] when both ways are in use at once.

    Receives are posted in the other order than sends: with one communicator for both kinds they
    would be mixed up. Sizes differ with the kind, as they may in a run.
    """
    links = mesh_for(layout, rank).links
    assert links.activation_in and links.activation_out
    assert links.gradient_in and links.gradient_out
    gradient, activation = torch.zeros(5), torch.zeros(3, 2)
    handles = [
        collectives.recv_async(gradient, links.gradient_in),
        collectives.recv_async(activation, links.activation_in),
        collectives.send_async(torch.full((3, 2), 100.0 + rank), links.activation_out),
        collectives.send_async(torch.full((5,), 200.0 + rank), links.gradient_out),
    ]
    for handle in handles:
        handle.wait()
    assert activation.unique().numel() == gradient.unique().numel() == 1
    return [int(activation[0, 0]), int(gradient[0])]


@pytest.mark.parametrize(
    "world, layout, before",
    [
        (2, ParallelLayout(pp=2), [1, 0]),
        (4, ParallelLayout(pp=4), [3, 0, 1, 2]),
        (4, ParallelLayout(pp=2, dp=2), [2, 3, 0, 1]),
        (4, ParallelLayout(tp=2, pp=2), [2, 3, 0, 1]),
    ],
)
def test_activations_go_to_the_next_stage_and_gradients_back(
    workers: Workers, world: int, layout: ParallelLayout, before: list[int]
) -> None:
    """On the ring of stages: the last sends activations to the first."""
    after = [before.index(rank) for rank in range(world)]
    results = workers(world).run(exchange, layout)
    assert results == [[100 + before[rank], 200 + after[rank]] for rank in range(world)]


def test_one_process_needs_no_group() -> None:
    mesh = Mesh.single()
    assert mesh.layout == ParallelLayout() and mesh.links == PipelineLinks()
    assert mesh.is_last_stage
    for name in AXES:
        axis = getattr(mesh, name)
        assert (axis.name, axis.size, axis.index, axis.group) == (name, 1, 0, None)
    assert Mesh.build(ParallelLayout(), 0) == mesh


def names_of_groups(rank: int, world: int, layout: ParallelLayout) -> tuple[list[str], list[str]]:
    mesh = mesh_for(layout, rank)
    links = [link.group.group_name for link in vars(mesh.links).values() if link is not None]
    return [group.group_name for group in mesh.groups], links


def comes_to_an_end(orders: list[list[str]]) -> bool:
    """Whether ranks that leave their groups in these orders, each waiting for all others of the
    group, leave them all."""
    while any(orders):
        ready = {
            order[0]
            for order in orders
            if order and all(o[0] == order[0] for o in orders if order[0] in o)
        }
        if not ready:
            return False
        orders = [order[1:] if order and order[0] in ready else order for order in orders]
    return True


@pytest.mark.parametrize("layout", [ParallelLayout(pp=4), ParallelLayout(tp=2, pp=2)])
def test_ranks_that_wait_for_each_other_destroy_all_groups(
    workers: Workers, layout: ParallelLayout
) -> None:
    found = workers(4).run(names_of_groups, layout)
    assert comes_to_an_end([groups for groups, _ in found])
    assert all(set(links) <= set(groups) for groups, links in found)
    # By the roles of its links, each rank of a ring would wait for the one before it.
    assert not comes_to_an_end([links for _, links in found])
