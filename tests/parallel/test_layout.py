"""Rank arithmetic, against enumeration and against examples written out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megads.parallel.layout import AXES, AxisName, BatchPlan, Coords, ParallelLayout

LAYOUTS = st.builds(
    ParallelLayout, tp=st.integers(1, 8), pp=st.integers(1, 6), dp=st.integers(1, 6)
)
AXIS_SETS = st.sets(st.sampled_from(AXES))
EXAMPLE = ParallelLayout(tp=2, pp=3, dp=2)


@given(LAYOUTS)
def test_rank_and_coords_are_inverse_and_count_tp_fastest_pp_slowest(
    layout: ParallelLayout,
) -> None:
    positions = [
        Coords(pp, dp, tp)
        for pp, dp, tp in itertools.product(range(layout.pp), range(layout.dp), range(layout.tp))
    ]
    assert [layout.coords(rank) for rank in range(layout.world_size)] == positions
    assert [layout.rank(position) for position in positions] == list(range(layout.world_size))


@given(layout=LAYOUTS, axes=AXIS_SETS)
def test_groups_partition_the_ranks_and_differ_only_along_their_axes(
    layout: ParallelLayout, axes: set[AxisName]
) -> None:
    groups = layout.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    for group in groups:
        assert len(group) == size and list(group) == sorted(group)
        positions = [layout.coords(rank) for rank in group]
        for axis in set(AXES) - axes:
            assert len({getattr(position, axis) for position in positions}) == 1
    outside = [
        tuple(getattr(layout.coords(group[0]), axis) for axis in AXES if axis not in axes)
        for group in groups
    ]
    assert len(set(outside)) == len(groups), "two groups at one place should have been one"


def test_the_groups_of_twelve_ranks_by_hand() -> None:
    """tp peers are neighbours, pp peers farthest apart."""
    assert EXAMPLE.world_size == 12
    assert EXAMPLE.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert EXAMPLE.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)]
    assert EXAMPLE.groups("pp") == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert EXAMPLE.groups("pp", "tp") == [(0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)]
    assert EXAMPLE.groups("tp", "pp") == EXAMPLE.groups("pp", "tp")
    assert EXAMPLE.groups() == [(rank,) for rank in range(12)]
    assert EXAMPLE.coords(7) == Coords(pp=1, dp=1, tp=1)
    assert EXAMPLE.coords(10) == Coords(pp=2, dp=1, tp=0)


@pytest.mark.parametrize("rank", [-1, 12, 100])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 12"):
        EXAMPLE.coords(rank)


@pytest.mark.parametrize(
    "tp, kv_heads, expected",
    [
        (4, 1, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (4, 4, [(rank,) for rank in range(8)]),
        (4, 8, [(rank,) for rank in range(8)]),
        (6, 3, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]),
        (6, 2, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]),
    ],
)
def test_kv_groups_by_hand(tp: int, kv_heads: int, expected: list[tuple[int, ...]]) -> None:
    assert ParallelLayout(tp=tp, dp=2).kv_groups(kv_heads) == expected


@given(layout=LAYOUTS, kv_heads=st.integers(1, 16))
def test_kv_groups_are_the_ranks_that_hold_one_head(layout: ParallelLayout, kv_heads: int) -> None:
    """Query heads are split evenly over tp, so the KV head of a rank's first one is its own."""
    if layout.tp % kv_heads and kv_heads % layout.tp:
        return  # no valid configuration
    holders: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        pp, dp, tp = layout.coords(rank)
        holders.setdefault((pp, dp, tp * kv_heads // layout.tp), []).append(rank)
    assert layout.kv_groups(kv_heads) == [tuple(ranks) for ranks in holders.values()]


def test_global_batch_size_by_hand() -> None:
    """Four replicas, each with three microbatches of two samples."""
    plan = BatchPlan(micro_batch_size=2, num_microbatches=3, dp=4, seq_length=16)
    assert plan.global_batch_size == 24
