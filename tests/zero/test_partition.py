"""Packing into buckets: nothing lost, nothing shared, every rank an equal part."""

from __future__ import annotations

import itertools
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from megads.zero.partition import ALIGNMENT, BucketPlan, Item, plan_buckets

Unit = tuple[int, list[int], Literal["", "first", "last"], int]
UNITS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(1, 5000), min_size=1, max_size=6),
        st.sampled_from(["", "", "first", "last"]),
        st.integers(1, 5000),
    ),
    max_size=12,
)
"""Units in backward order: the chunk, sizes of the parameters, where among them there is a tied one
(as in an embedding or a head) and of which size."""


def items_of(units: list[Unit]) -> list[Item]:
    """The chunks come one after the other, and so do the units of a chunk."""
    items = []
    for number, (chunk, numels, place, tied) in enumerate(sorted(units, key=lambda u: -u[0])):
        name = f"unit{number}"
        unit = [Item(chunk, name, numel) for numel in numels]
        if place:
            unit.insert(0 if place == "first" else len(unit), Item(chunk, name, tied, tied=True))
        items += unit
    return items


@settings(max_examples=50, deadline=None)
@given(units=UNITS, dp=st.integers(1, 9), bucket_numel=st.integers(1, 20000))
def test_every_parameter_has_one_place_and_every_rank_one_part(
    units: list[Unit], dp: int, bucket_numel: int
) -> None:
    items = items_of(units)
    plans = plan_buckets(items, dp=dp, bucket_numel=bucket_numel)
    assert [p.index for plan in plans for p in plan.placements] == list(range(len(items)))
    for plan in plans:
        check_parts(plan, dp)
        end = 0
        for place in plan.placements:
            assert place.start % ALIGNMENT == 0 and end <= place.start < end + ALIGNMENT
            end = place.stop
            item = items[place.index]
            assert place.numel == item.numel
            assert (item.chunk, item.tied) == (plan.chunk, plan.tied)
        assert end <= plan.numel < end + ALIGNMENT * (dp + 1)
        held = [items[place.index].unit for place in plan.placements]
        assert plan.units == tuple(dict.fromkeys(held))
        assert len(held) == 1 or (not plan.tied and end <= bucket_numel)


def check_parts(plan: BucketPlan, dp: int) -> None:
    """Equal parts that follow each other, for any number of them that divides dp as well."""
    for parts in (n for n in range(1, dp + 1) if dp % n == 0):
        ranges = [plan.part(parts, index) for index in range(parts)]
        assert ranges[0][0] == 0 and ranges[-1][1] == plan.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert len({stop - start for start, stop in ranges}) == 1


@settings(max_examples=50, deadline=None)
@given(units=UNITS, bucket_numel=st.integers(1, 20000))
def test_a_bucket_holds_whole_units_or_a_part_of_one(units: list[Unit], bucket_numel: int) -> None:
    """So that no unit needs more than its own size or one bucket to be there."""
    items = items_of(units)
    plans = plan_buckets(items, dp=2, bucket_numel=bucket_numel)
    for plan in plans:
        for unit in plan.units:
            has_more = any(
                items[place.index].unit == unit
                for other in plans
                for place in other.placements
                if other is not plan and not other.tied
            )
            assert not has_more or plan.tied or plan.units == (unit,)


@settings(max_examples=50, deadline=None)
@given(units=UNITS, bucket_numel=st.integers(1, 20000))
def test_units_in_one_bucket_are_neighbours(units: list[Unit], bucket_numel: int) -> None:
    items = items_of(units)
    order = list(dict.fromkeys(item.unit for item in items))
    for plan in plan_buckets(items, dp=1, bucket_numel=bucket_numel):
        first = order.index(plan.units[0])
        assert list(plan.units) == order[first : first + len(plan.units)]


def grouped(items: list[Item], bucket_numel: int) -> list[list[int]]:
    plans = plan_buckets(items, dp=1, bucket_numel=bucket_numel)
    return [[p.index for p in plan.placements] for plan in plans]


def test_order_is_kept_so_that_early_gradients_share_the_first_bucket() -> None:
    assert grouped([Item(0, f"{n}", 64) for n in range(6)], 128) == [[0, 1], [2, 3], [4, 5]]


def test_a_unit_is_not_torn_to_fill_a_bucket() -> None:
    items = [Item(0, "c", 64), *[Item(0, "b", 64)] * 2, *[Item(0, "a", 64)] * 2]
    assert grouped(items, 128) == [[0], [1, 2], [3, 4]]
    assert grouped(items, 192) == [[0, 1, 2], [3, 4]]
    # A unit larger than a bucket is cut, and shares none of its buckets with another unit.
    assert grouped([Item(0, "b", 64), *[Item(0, "a", 64)] * 3], 128) == [[0], [1, 2], [3]]
    assert grouped([*[Item(0, "b", 64)] * 3, Item(0, "a", 64)], 128) == [[0, 1], [2], [3]]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    assert grouped([Item(0, "a", 64), Item(0, "a", 1000), Item(0, "a", 64)], 128) == [[0], [1], [2]]


def test_a_tied_weight_lies_alike_on_both_stages() -> None:
    """Whatever is packed around it there: as long and in a bucket of its own."""
    first = plan_buckets(
        [Item(0, "blocks.0", 100), Item(0, "embedding", 70), Item(0, "embedding", 900, tied=True)],
        dp=4,
        bucket_numel=4000,
    )
    last = plan_buckets(
        [Item(1, "head", 900, tied=True), Item(1, "head", 3), Item(1, "blocks.1", 100)],
        dp=4,
        bucket_numel=4000,
    )
    (a,), (b,) = ([p for p in plans if p.tied] for plans in (first, last))
    assert a.numel == b.numel
    assert [(p.start, p.numel) for p in a.placements] == [(p.start, p.numel) for p in b.placements]
