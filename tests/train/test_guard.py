"""What counts as a bad step: thresholds by hand, windows, and going on from a saved state."""

from __future__ import annotations

import json
import math
import random
from statistics import median

import pytest

from megads.config.schema import TrainConfig
from megads.train.guard import Guard, Verdict


def guard(*, spike: str = "stop", window: int = 4, **fields: float | None) -> Guard:
    return Guard(TrainConfig.model_validate({"spike": spike, "spike_window": window, **fields}))


def after(judge: Guard, *losses: float, norm: float = 1.0) -> Guard:
    for loss in losses:
        assert judge.judge(loss, norm) == "good"
    return judge


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spike", ["off", "stop"])
def test_what_is_not_finite_is_bad_from_the_first_step_on(bad: float, spike: str) -> None:
    judge = guard(spike=spike)
    assert judge.judge(bad, 1.0) == judge.judge(2.0, bad) == "nonfinite"
    assert judge.judge(2.0, 1.0) == "good"


@pytest.mark.parametrize(
    ("loss", "norm", "verdict"),
    [
        (6.0, 1.0, "good"),  # 2 x the median of 1, 2, 4, 9 is 6, and a spike is above it
        (6.001, 1.0, "spike"),
        (3.0, 10.0, "good"),
        (3.0, 10.001, "spike"),
        (0.001, 0.0, "good"),
        (6.001, math.nan, "nonfinite"),
    ],
)
def test_thresholds_by_hand(loss: float, norm: float, verdict: Verdict) -> None:
    judge = after(guard(spike="off"), 9.0, 1.0, 4.0, 2.0).state_dict()
    other = guard(spike_loss=2.0, spike_norm=10.0)
    other.load_state_dict(judge)
    assert other.judge(loss, norm) == verdict


def test_each_threshold_can_be_off() -> None:
    assert after(guard(spike_loss=None), *[1.0] * 4).judge(1e9, 1.0) == "good"
    assert after(guard(spike_norm=None), *[1.0] * 4).judge(1.0, 1e9) == "good"
    assert after(guard(spike="off"), *[1.0] * 4).judge(1e9, 1e9) == "good"


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    judge = after(guard(), 1.0, 1.0, 1.0, 50.0)
    assert judge.judge(2.001, 1.0) == "spike"


def test_nothing_is_a_spike_of_nothing() -> None:
    """A median of 0: batches without a token that counts in the loss."""
    judge = after(guard(), *[0.0] * 4, norm=0.0)
    assert judge.judge(5.0, 1.0) == "good"


def test_bad_steps_do_not_change_what_is_usual() -> None:
    judge = after(guard(), *[1.0] * 4)
    for _ in range(9):
        assert judge.judge(3.0, 1.0) == "spike"
        assert judge.judge(math.nan, 1.0) == "nonfinite"


def test_a_new_level_is_as_many_spikes_in_a_row_as_the_window() -> None:
    judge = after(guard(), *[1.0] * 4)
    for _ in range(3):
        judge.judge(3.0, 1.0)
    assert not judge.is_new_level
    after(judge, 1.0)
    for number in range(1, 5):
        judge.judge(3.0, 1.0)
        assert judge.is_new_level == (number == 4)


def test_against_plain_lists_and_from_any_saved_state() -> None:
    draw = random.Random(1)
    pairs = [(draw.lognormvariate(1, 0.5), draw.lognormvariate(0, 1.2)) for _ in range(400)]
    losses: list[float] = []
    norms: list[float] = []
    want: list[Verdict] = []
    for loss, norm in pairs:
        full = len(losses) >= 5
        high = full and (loss > 1.7 * median(losses[-5:]) or norm > 4 * median(norms[-5:]))
        want.append("spike" if high else "good")
        if not high:
            losses.append(loss)
            norms.append(norm)
    assert 20 < want.count("spike") < 200
    straight = guard(window=5, spike_loss=1.7, spike_norm=4.0)
    cut = [draw.randrange(400) for _ in range(20)]
    for number, (pair, verdict) in enumerate(zip(pairs, want, strict=True)):
        if number in cut:
            state = json.loads(json.dumps(straight.state_dict()))
            straight = guard(window=5, spike_loss=1.7, spike_norm=4.0)
            straight.load_state_dict(state)
        assert straight.judge(*pair) == verdict


def test_a_shorter_window_takes_the_last_steps() -> None:
    saved = after(guard(window=6), 9.0, 9.0, 9.0, 1.0, 1.0, 1.0).state_dict()
    shorter, longer = guard(window=3), guard(window=7)
    shorter.load_state_dict(saved)
    longer.load_state_dict(saved)
    assert shorter.judge(2.5, 1.0) == "spike"
    assert longer.judge(2.5, 1.0) == "good"
