from __future__ import annotations

import json
import random

import pytest

from megads.config.schema import PrecisionConfig
from megads.optim.scaler import LossScaler


def fp16(**fields) -> LossScaler:
    return LossScaler(PrecisionConfig(name="fp16", **fields))


def test_grows_after_a_window_of_good_updates():
    scaler = fp16(initial_loss_scale=8.0, loss_scale_window=3)
    scales = []
    for _ in range(7):
        scaler.update(ok=True)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 16, 16, 32, 32]
    assert (scaler.good_steps, scaler.skipped) == (1, 0)


def test_halves_on_overflow_and_starts_the_window_again():
    scaler = fp16(initial_loss_scale=8.0, loss_scale_window=3)
    for ok in (True, True, False, True, True):
        scaler.update(ok=ok)
    assert (scaler.scale, scaler.good_steps, scaler.skipped) == (4.0, 2, 1)
    scaler.update(ok=True)
    assert scaler.scale == 8.0


def test_never_below_the_minimum_and_says_when_lowering_cannot_help():
    scaler = fp16(initial_loss_scale=3.0, min_loss_scale=2.0)
    scaler.update(ok=False)
    assert (scaler.scale, scaler.exhausted) == (2.0, False)
    scaler.update(ok=False)
    assert (scaler.scale, scaler.exhausted, scaler.skipped) == (2.0, True, 2)
    scaler.update(ok=True)
    assert not scaler.exhausted


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_other_precisions_count_but_never_scale(name):
    scaler = LossScaler(PrecisionConfig(name=name, loss_scale_window=1))
    for ok in (True, False, True):
        scaler.update(ok=ok)
    assert (scaler.scale, scaler.skipped, scaler.exhausted) == (1.0, 1, False)


def test_what_did_not_overflow_says_nothing_about_the_scale():
    scaler = fp16(initial_loss_scale=8.0, loss_scale_window=3)
    for _ in range(2):
        scaler.update(ok=True)
        scaler.skip()
    assert (scaler.scale, scaler.good_steps, scaler.skipped) == (8.0, 2, 2)
    scaler.update(ok=True)
    assert scaler.scale == 16.0


@pytest.mark.parametrize("seed", range(5))
def test_continuing_from_saved_state_equals_never_stopping(seed):
    draw = random.Random(seed)
    outcomes = [draw.random() < 0.8 for _ in range(60)]
    cut = draw.randrange(60)
    straight = fp16(loss_scale_window=4)
    stopped = fp16(loss_scale_window=4)
    for ok in outcomes:
        straight.update(ok=ok)
    for ok in outcomes[:cut]:
        stopped.update(ok=ok)
    resumed = fp16(loss_scale_window=4)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for ok in outcomes[cut:]:
        resumed.update(ok=ok)
    assert resumed.state_dict() == straight.state_dict()
    fresh = fp16(loss_scale_window=4)
    for ok in outcomes[cut:]:
        fresh.update(ok=ok)
    assert cut == 0 or fresh.state_dict() != straight.state_dict()


def test_a_change_of_precision_keeps_the_count_and_starts_its_own_scale():
    bf16 = LossScaler(PrecisionConfig(name="bf16"))
    bf16.update(ok=False)
    half = fp16(initial_loss_scale=1024.0)
    half.load_state_dict(bf16.state_dict())
    assert (half.scale, half.skipped) == (1024.0, 1)
    half.update(ok=False)
    back = LossScaler(PrecisionConfig(name="fp32"))
    back.load_state_dict(half.state_dict())
    assert (back.scale, back.skipped) == (1.0, 2)
