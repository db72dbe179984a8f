from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data.blend import MAX_PERIOD, Blend, integer_weights
from megads.errors import DataError


def deviation(sources: np.ndarray, weights: list[float]) -> float:
    """Largest distance of any source's count from its weight x n, over all prefixes."""
    share = np.asarray(weights) / np.sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return float(np.abs(counts - share * np.arange(1, len(sources) + 1)[:, None]).max())


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any),
    scale=st.sampled_from([1.0, 0.01, 0.125]),
)
def test_counts_stay_within_one_of_the_weights(parts: list[int], scale: float) -> None:
    weights = [part * scale for part in parts]
    blend = Blend(integer_weights(weights))
    source, inside = blend.locate(np.arange(2 * blend.period + 57))
    assert deviation(source, weights) < 1
    for number in range(len(parts)):
        mine = inside[source == number]
        assert mine.tolist() == list(range(len(mine)))
        assert parts[number] or not len(mine)


@pytest.mark.parametrize(
    ("weights", "n", "counts"),
    [
        ([0, 1], 20, [0, 20]),
        ([1, 0], 20, [20, 0]),
        ([0.001, 0.999], 1000, [1, 999]),
        ([0.3, 0.7], 10, [3, 7]),
        ([3, 7], 10, [3, 7]),
        ([1 / 3, 2 / 3], 3_000_000, [1_000_000, 2_000_000]),
    ],
)
def test_counts_by_hand(weights: list[float], n: int, counts: list[int]) -> None:
    source, _ = Blend(integer_weights(weights)).locate(np.arange(n))
    assert np.bincount(source, minlength=len(weights)).tolist() == counts


def test_a_greedy_rule_would_fail() -> None:
    """The negative control: one big and many small sources, where serving whoever lags most by
    the midpoint of its next sample (the usual divisor rule) is off by many samples."""
    weights = [0.5, *[0.01] * 50]
    due = np.concatenate([(np.arange(200 * w) + 0.5) / w for w in weights])
    source = np.repeat(np.arange(51), [100, *[2] * 50])[np.argsort(due, kind="stable")]
    assert deviation(source, weights) > 5
    assert deviation(Blend(integer_weights(weights)).locate(np.arange(200))[0], weights) < 1


def test_irrational_weights_are_rounded_to_a_millionth() -> None:
    weights = [2**0.5, 3**0.5, 1e-9, 0.0]
    parts = integer_weights(weights)
    assert sum(parts) == MAX_PERIOD
    assert parts[2:] == (1, 0)
    exact = np.asarray(weights) / sum(weights) * MAX_PERIOD
    assert np.abs(np.asarray(parts) - exact).max() <= 1
    source, _ = Blend(integer_weights(weights)).locate(np.arange(20_000))
    assert deviation(source, weights) < 1


@pytest.mark.parametrize(
    "weights", [[-1, 2], [float("nan"), 1], [float("inf"), 1], [0, 0], [-0.5, -0.5]]
)
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"data\.weights"):
        Blend(integer_weights(weights))


@pytest.mark.parametrize("parts", [[3, 7], [1, 0, 4, 2], [6, 9], [1]])
def test_counts_and_their_inverse(parts: list[int]) -> None:
    """Against counting one position after the other."""
    blend = Blend(parts)
    source, _ = blend.locate(np.arange(60))
    for length in range(60):
        want = np.bincount(source[:length], minlength=len(parts))
        assert blend.counts(length).tolist() == want.tolist()
    for number in np.flatnonzero(parts):
        for count, position in enumerate(np.flatnonzero(source == number), 1):
            assert blend.position_after(int(number), count) == position + 1


def test_a_smaller_period_can_be_asked_for() -> None:
    sizes = [123_456_789, 7, 987_654_321]
    assert integer_weights(sizes, most=1000) == (111, 1, 888), "what has a sample has a part"
    assert integer_weights([20, 30], most=1000) == (2, 3)
