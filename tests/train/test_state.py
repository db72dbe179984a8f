"""Progress of a run: counted by hand, saved as plain values, restored whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megads.errors import CheckpointError
from megads.parallel.layout import BatchPlan
from megads.train.state import TrainState


def test_counts_of_batches_that_change_size() -> None:
    """Two batches of 2 x 3 x 2 = 12 samples, then three of 1 x 5 x 4 = 20 longer ones."""
    state = TrainState()
    for _ in range(2):
        state.advance(BatchPlan(micro_batch_size=2, num_microbatches=3, dp=2, seq_length=16))
    assert (state.step, state.samples, state.tokens) == (2, 24, 24 * 16)
    for _ in range(3):
        state.advance(BatchPlan(micro_batch_size=1, num_microbatches=5, dp=4, seq_length=32))
    assert (state.step, state.samples, state.tokens) == (5, 84, 24 * 16 + 60 * 32)


def test_counts_do_not_overflow() -> None:
    state = TrainState(step=2**31 - 1, samples=2**40, tokens=2**62)
    state.advance(BatchPlan(micro_batch_size=2**10, num_microbatches=1, dp=2**10, seq_length=2**42))
    assert (state.step, state.tokens) == (2**31, 2**63)


def test_through_json_and_back() -> None:
    state = TrainState(step=7, samples=2**53 + 1, tokens=2**60 + 1)
    other = TrainState(step=1)
    assert other.run_id != state.run_id
    other.restore(json.loads(json.dumps(state.to_dict())))
    assert other == state
    assert set(state.to_dict()) == {"step", "samples", "tokens", "run_id", "data_plan"}
    other.advance(BatchPlan(1, 1, 1, 1))
    assert state.step == 7, "to_dict gave values, not the object"


@pytest.mark.parametrize(
    "change, named",
    [
        ({"tokens": None}, "tokens"),
        ({"scheduler": 3}, "scheduler"),
        ({"step": None, "samples": None}, "step"),
    ],
)
def test_a_state_with_other_fields_is_refused_and_nothing_taken_over(
    change: dict[str, Any], named: str
) -> None:
    data = TrainState(step=9, samples=90, tokens=900, run_id="saved").to_dict() | change
    data = {name: value for name, value in data.items() if value is not None}
    state = TrainState(run_id="mine")
    with pytest.raises(CheckpointError, match="the checkpoint's training state has") as error:
        state.restore(data)
    assert named in str(error.value)
    assert state == TrainState(run_id="mine")


def test_every_run_has_its_own_name() -> None:
    assert len({TrainState().run_id for _ in range(50)}) == 50
