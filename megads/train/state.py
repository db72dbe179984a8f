"""What a run has done so far: everything that is saved beside the model and the optimizer."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megads.errors import CheckpointError
from megads.parallel.layout import BatchPlan


@dataclass
class TrainState:
    """Progress of a run.

    `step` counts global batches, skipped updates included; `samples` and `tokens` what they
    consumed. The data position, the learning rate and the dropout seeds are pure functions of
    these, so no sampler, scheduler or generator state exists. `run_id` names the run for loggers.
    `data_plan` says what the samples were and will be (`megads.data.plan`); None for a stream, and
    in checkpoints that do not have it.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    data_plan: dict[str, Any] | None = None

    def advance(self, batch: BatchPlan) -> None:
        """One global batch has been consumed."""
        self.step += 1
        self.samples += batch.global_batch_size
        self.tokens += batch.global_batch_size * batch.seq_length

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `to_dict` gave; raises CheckpointError on missing or unknown fields."""
        expected = {f.name for f in fields(self)}
        data = {"data_plan": None, **data}
        if set(data) != expected:
            raise CheckpointError(
                f"the checkpoint's training state has {sorted(data)}, expected {sorted(expected)}"
            )
        for name, value in data.items():
            setattr(self, name, value)
