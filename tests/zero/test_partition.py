"""Packing into buckets: nothing lost, nothing shared, every rank an equal chunk."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megads.zero.partition import ALIGNMENT, plan_buckets

KINDS = st.sampled_from(["plain", "tp_partial", "kv_copies", "tied"])


@given(
    params=st.lists(st.tuples(st.integers(0, 2), KINDS, st.integers(1, 5000)), max_size=40),
    dp=st.integers(1, 9),
    bucket_numel=st.integers(1, 20000),
)
def test_every_parameter_has_one_place_and_every_rank_one_chunk(
    params: list[tuple[int, str, int]], dp: int, bucket_numel: int
) -> None:
    chunks, kinds, numels = ([p[i] for p in params] for i in range(3))
    plans = plan_buckets(chunks, kinds, numels, dp=dp, bucket_numel=bucket_numel)
    assert sorted(p.index for plan in plans for p in plan.placements) == list(range(len(params)))
    for plan in plans:
        ranges = [plan.owned(dp, index) for index in range(dp)]
        assert ranges[0][0] == 0 and ranges[-1][1] == plan.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert len({stop - start for start, stop in ranges}) == 1
        end = 0
        for place in plan.placements:
            assert place.start % ALIGNMENT == 0 and end <= place.start < end + ALIGNMENT
            end = place.stop
            assert place.numel == numels[place.index]
            assert chunks[place.index] == plan.chunk and kinds[place.index] == plan.kind
        assert end <= plan.numel < end + ALIGNMENT * (dp + 1)
        assert len(plan.placements) == 1 or (plan.kind != "tied" and end <= bucket_numel)


def test_order_is_kept_so_that_early_gradients_share_the_first_bucket() -> None:
    plans = plan_buckets([0] * 6, ["plain"] * 6, [64] * 6, dp=1, bucket_numel=128)
    assert [[p.index for p in plan.placements] for plan in plans] == [[0, 1], [2, 3], [4, 5]]
