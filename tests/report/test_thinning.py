"""Thinned curves keep their ends and every extreme."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megads.report.thinning import thin


@pytest.mark.parametrize("count", [0, 1, 9, 10])
def test_few_values_stay_as_they_are(count: int) -> None:
    assert thin([1.0] * count, 10) == list(range(count))


@pytest.mark.parametrize("limit", [4, 5, 10, 101])
def test_extremes_and_ends_are_kept(limit: int) -> None:
    """In every stretch, wherever the spikes are; every nth value would miss them."""
    draws = random.Random(limit)
    for _ in range(200):
        count = draws.randint(limit + 1, 700)
        values = [draws.random() for _ in range(count)]
        up, down = draws.randrange(count), draws.randrange(count)
        values[up], values[down] = 100.0, -100.0
        kept = thin(values, limit)
        assert kept == sorted(set(kept)) and len(kept) <= limit
        assert {0, count - 1, values.index(max(values)), values.index(min(values))} <= set(kept)
        longest_stretch = count // ((limit - 2) // 2) + 1
        assert max(b - a for a, b in pairwise(kept)) < 2 * longest_stretch


def test_two_spikes_far_apart_are_both_there() -> None:
    values = [0.0] * 10_000
    values[3333], values[7777] = 5.0, 4.0
    assert {3333, 7777} <= set(thin(values, 100))
