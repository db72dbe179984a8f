from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.config.schema import OptimConfig
from megads.optim.lr import learning_rate

SCHEDULES = get_args(OptimConfig.model_fields["schedule"].annotation)


def optim(**fields) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-3, "min_lr": 1e-4, "warmup": 2, **fields})


def test_cosine_values_worked_by_hand():
    config = optim(schedule="cosine")
    rates = [learning_rate(config, n, 10) for n in range(1, 11)]
    assert rates[:2] == [5e-4, 1e-3]
    expected = [7.222e-4, 5.5e-4, 3.778e-4, 2.318e-4, 1.343e-4, 1e-4]
    assert rates[4:] == pytest.approx(expected, rel=5e-4)
    closed = [1e-4 + 0.5 * (1 + math.cos(math.pi * (n - 2) / 8)) * 9e-4 for n in range(2, 11)]
    assert rates[1:] == pytest.approx(closed, rel=1e-12)


def test_counting_from_zero_would_be_seen():
    config = optim(schedule="cosine")
    shifted = [learning_rate(config, n, 10) for n in range(4, 10)]
    assert shifted != pytest.approx(
        [7.222e-4, 5.5e-4, 3.778e-4, 2.318e-4, 1.343e-4, 1e-4], rel=0.02
    )


def test_linear_values_worked_by_hand():
    config = optim(schedule="linear", lr=1.0, min_lr=0.2, warmup=4)
    rates = [learning_rate(config, n, 8) for n in range(1, 11)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_inverse_sqrt_values_worked_by_hand():
    config = optim(schedule="inverse_sqrt", lr=0.3, min_lr=0.11, warmup=4)
    rates = [learning_rate(config, n, 100) for n in (2, 4, 9, 16, 36)]
    assert rates == pytest.approx([0.15, 0.3, 0.2, 0.15, 0.11])


def test_wsd_values_worked_by_hand():
    config = optim(schedule="wsd", lr=1.0, min_lr=0.0, warmup=2, decay=4)
    rates = [learning_rate(config, n, 10) for n in range(1, 12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


def test_wsd_without_decay_and_constant_have_no_end():
    for config in (optim(schedule="wsd"), optim(schedule="constant")):
        assert [learning_rate(config, n, 4) for n in (1, 2, 4, 50)] == [5e-4, 1e-3, 1e-3, 1e-3]


def test_wsd_decay_that_reaches_into_the_warmup_begins_after_it():
    config = optim(schedule="wsd", lr=1.0, min_lr=0.0, warmup=6, decay=9)
    rates = [learning_rate(config, n, 10) for n in range(5, 11)]
    assert rates == pytest.approx([5 / 6, 1, 0.75, 0.5, 0.25, 0])


def ramped_batches(start: int, step: int, final: int, every: int, iterations: int) -> list[int]:
    """Batch sizes of a ramp that steps up each `every` samples, by a plain loop."""
    sizes, consumed = [], 0
    for _ in range(iterations):
        sizes.append(min(start + consumed // every * step, final))
        consumed += sizes[-1]
    return sizes


def test_samples_with_a_ramp_reach_min_lr_with_the_last_batch():
    sizes = ramped_batches(4, 4, 12, 12, 8)
    assert sizes == [4, 4, 4, 8, 8, 12, 12, 12]
    consumed = [sum(sizes[: i + 1]) for i in range(8)]
    for schedule in ("linear", "cosine", "wsd"):
        config = optim(schedule=schedule, units="samples", warmup=10, decay=30)
        rates = [learning_rate(config, c, consumed[-1]) for c in consumed]
        assert rates[-1] == config.min_lr
        assert rates[-2] > config.min_lr
        assert rates[:2] == pytest.approx([4e-4, 8e-4])


def test_samples_continue_from_what_was_consumed_after_a_batch_change():
    """Resume at iteration 4 of the ramp (20 samples) with global batch 6 instead of 12."""
    config = optim(schedule="linear", lr=1.0, min_lr=0.0, units="samples", warmup=0, total=64)
    consumed, rates = 20, []
    while consumed < 64:
        consumed += 6
        rates.append(learning_rate(config, consumed, 999))
    assert rates == pytest.approx([1 - c / 64 for c in range(26, 64, 6)] + [0.0])


def test_skipped_and_accumulated_steps_do_not_move_the_schedule():
    """Progress is an argument: calling more often, as with accumulation, changes nothing."""
    config = optim(schedule="cosine")
    once = [learning_rate(config, n, 10) for n in range(1, 11)]
    often = [[learning_rate(config, n, 10) for _ in range(4)][-1] for n in range(1, 11)]
    assert once == often


def test_no_update_before_the_first():
    with pytest.raises(ValueError):
        learning_rate(optim(), 0, 10)


@settings(deadline=None, max_examples=50)
@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 40),
    total=st.integers(1, 60),
    decay=st.integers(0, 70),
    progress=st.integers(1, 100),
)
def test_always_between_zero_and_peak_and_exact_at_the_ends(
    schedule, warmup, total, decay, progress
):
    config = optim(schedule=schedule, warmup=warmup, decay=decay)
    rate = learning_rate(config, progress, total)
    assert 0 < rate <= config.lr
    if progress > warmup:
        assert rate >= config.min_lr
    if progress == warmup < total:
        assert rate == config.lr
    if progress >= max(warmup, total) and schedule in ("linear", "cosine"):
        assert rate == config.min_lr


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(1, 20))
def test_never_rises_after_the_warmup(schedule, warmup, decay):
    config = optim(schedule=schedule, warmup=warmup, decay=decay)
    rates = [learning_rate(config, n, 50) for n in range(max(warmup, 1), 60)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
