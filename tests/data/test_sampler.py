from __future__ import annotations

import hashlib
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.config.rampup import BatchRampup
from megads.data.sampler import (
    EvaluationPlan,
    cut_for_validation,
    global_batch_positions,
    num_samples,
    rank_slice,
    samples_of,
)
from megads.errors import ConfigError


@pytest.mark.parametrize(
    ("lengths", "seq", "expected"),
    [
        ([3, 0, 5, 1, 12], 4, 5),
        ([9], 4, 2),
        ([5], 4, 1),
        ([4], 4, 0),
        ([2, 2, 2], 8, 0),
        ([0, 0], 4, 0),
        ([2**30] * 3, 2**20, 3071),
    ],
)
def test_samples_of_short_and_exact_corpora(lengths: list[int], seq: int, expected: int) -> None:
    assert num_samples(sum(lengths), seq) == expected


def ids_of(n: int, seed: int, positions: np.ndarray) -> np.ndarray:
    """Of a single source."""
    return samples_of(np.zeros_like(positions), positions, [n], [seed])


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**30))
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    ids = ids_of(n, seed, np.arange(epoch * n, (epoch + 1) * n))
    assert sorted(ids.tolist()) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 500
    runs = {
        (seed, epoch): tuple(ids_of(n, seed, np.arange(epoch * n, (epoch + 1) * n)))
        for seed in (0, 1, 2**40)
        for epoch in (0, 1, 2)
    }
    assert len(set(runs.values())) == len(runs)
    assert tuple(range(n)) not in runs.values()


def scalar_order(n: int, seed: int, epoch: int) -> list[int]:
    """The documented permutation on Python integers, one id at a time."""
    text = f"megads epoch order: seed {seed}, epoch {epoch}".encode()
    keys = struct.unpack("<8Q", hashlib.blake2b(text, digest_size=64).digest())
    bits = (n - 1).bit_length()
    high_bits, low_bits = bits // 2, bits - bits // 2

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def once(x: int) -> int:
        high, low = divmod(x, 2**low_bits)
        for key_even, key_odd in zip(keys[::2], keys[1::2], strict=True):
            low ^= mix(high ^ key_even) % 2**low_bits
            high ^= mix(low ^ key_odd) % 2**high_bits
        return high * 2**low_bits + low

    result = []
    for x in range(n):
        x = once(x)
        while x >= n:
            x = once(x)
        result.append(x)
    return result


@pytest.mark.parametrize("n", [1, 2, 3, 10, 17, 1000])
def test_the_order_is_the_documented_one(n: int) -> None:
    ids = ids_of(n, 77, np.arange(3 * n)).tolist()
    assert ids == [i for epoch in range(3) for i in scalar_order(n, 77, epoch)]


def test_the_order_never_changes() -> None:
    """Other values here would mean other data for every resumed run."""
    first = [6, 5, 4, 3, 8, 0, 7, 1, 9, 2]
    second = [2, 1, 4, 7, 8, 0, 5, 9, 3, 6]
    assert ids_of(10, 1234, np.arange(20)).tolist() == first + second


def test_the_order_is_as_good_as_random() -> None:
    """Over seeds each id is equally often at each place, and neighbours are unrelated."""
    n, trials = 12, 1500
    counts = np.zeros((n, n))
    follows = np.zeros((n, n))
    for seed in range(trials):
        ids = ids_of(n, seed, np.arange(n))
        counts[np.arange(n), ids] += 1
        follows[ids[:-1], ids[1:]] += 1
    expected = trials / n
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 121 + 5 * np.sqrt(2 * 121)  # 11 x 11 degrees of freedom, five sigma
    pair = trials / n  # n - 1 places x 1 / (n (n - 1))
    off = follows[~np.eye(n, dtype=bool)]
    assert ((off - pair) ** 2 / pair).sum() < 132 + 5 * np.sqrt(2 * 132)


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    ids = ids_of(10**15, 3, np.arange(3 * 10**15 - 4, 3 * 10**15 + 4))
    assert len(set(ids.tolist())) == 8
    assert ids.min() >= 0
    assert ids.max() < 10**15


def steps_of(n: int, batch: int, steps: range) -> list[int]:
    batches = (global_batch_positions(step * batch, batch) for step in steps)
    return [int(i) for positions in batches for i in ids_of(n, 7, positions)]


def test_resuming_inside_an_epoch_repeats_and_loses_nothing() -> None:
    whole = steps_of(20, 2, range(25))
    assert steps_of(20, 2, range(9)) + steps_of(20, 2, range(9, 25)) == whole
    for epoch in (0, 1):
        assert Counter(whole[20 * epoch : 20 * epoch + 20]) == Counter(range(20))
    assert max(Counter(whole).values()) - min(Counter(whole).values()) <= 1


@pytest.mark.parametrize("asked", [15, 18, 19, 25])
def test_partial_epochs(asked: int) -> None:
    ids = steps_of(10, 1, range(asked))
    assert Counter(ids[:10]) == Counter(range(10))
    counts = Counter(ids)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_share_the_global_batch(micro: int, dp: int) -> None:
    positions = global_batch_positions(36, 24)
    rows = np.concatenate([rank_slice(positions, micro, dp, rank) for rank in range(dp)])
    assert rows.shape == (24 // micro, micro)
    assert rows.reshape(-1).tolist() == list(range(36, 60))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="global batch 10"):
        rank_slice(global_batch_positions(0, 10), 4, 2, 0)


def test_ramp_up_counts_the_samples_really_used() -> None:
    ramp, consumed, sizes = BatchRampup.make((4, 4, 24), final=12), 0, []
    for step in range(8):
        assert ramp.consumed_after(step) == consumed
        sizes.append(ramp.size_at(consumed))
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 8, 8, 12, 12, 12]
    assert consumed == ramp.consumed_after(8) == 64
    assert ramp.consumed_after(4, consumed=ramp.consumed_after(4)) == 64
    assert ramp.sizes() == (4, 8, 12)
    smaller = BatchRampup.make(None, final=6)  # another batch size from step 4 on
    assert smaller.consumed_after(3, consumed=20) == 38


def test_no_ramp_up_is_a_constant() -> None:
    ramp = BatchRampup.make(None, final=6)
    assert {ramp.size_at(c) for c in range(0, 600, 6)} == {6}
    assert ramp.consumed_after(10**9) == 6 * 10**9


@pytest.mark.parametrize("rampup", [(4, 5, 24), (16, 4, 24)])
def test_a_ramp_that_misses_the_final_size(rampup: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=12"):
        BatchRampup.make(rampup, final=12)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    fraction=st.floats(0, 0.999),
)
def test_validation_cut(lengths: list[int], fraction: float) -> None:
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    total = starts[-1]
    cut = cut_for_validation(total, len(lengths), starts.__getitem__, fraction)
    share = round(total * fraction)
    assert 0 <= cut <= total
    assert 2 * abs((total - cut) - share) <= share
    near = [s for s in starts if 0 < s < total and 2 * abs(s - (total - share)) <= share]
    if share == total:
        assert cut == 0
    elif share and near:
        assert cut in near
    else:
        assert cut == total - share


def test_validation_cut_by_hand() -> None:
    def cut(lengths: list[int], fraction: float) -> int:
        starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
        return cut_for_validation(starts[-1], len(lengths), starts.__getitem__, fraction)

    assert cut([60, 28, 12], 0.1) == 88  # the boundary at 88 is 2 from 90, less than half of 10
    assert cut([60, 20, 20], 0.1) == 90  # 80 would double the share: cut inside the document
    assert cut([100], 0.1) == 90
    assert cut([100], 0.0) == 100


def test_evaluation_is_planned_before_it_begins() -> None:
    plan = EvaluationPlan.make([11, 0, 4, 1], global_batch_size=4)
    parts = [(part.source, part.first, part.count) for part in plan.batches]
    assert parts == [(0, 0, 4), (0, 4, 4), (0, 8, 3), (2, 0, 4), (3, 0, 1)]
    assert (plan.samples, plan.num_batches) == (16, 5)
    assert EvaluationPlan.make([0], global_batch_size=4).num_batches == 0
