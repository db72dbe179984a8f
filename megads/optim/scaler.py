"""Dynamic loss scaling (Micikevicius et al., arXiv:1710.03740) and the count of skipped updates."""

from __future__ import annotations

from typing import Any

from megads.config.schema import PrecisionConfig


class LossScaler:
    """What the loss is multiplied by before the backward pass, and how often that went wrong.

    In fp16 the scale doubles after `loss_scale_window` good updates in a row and halves on every
    overflow, never below `min_loss_scale`. In fp32 and bf16 it is always 1, and only the counters
    move. Nothing is communicated here: every decision must be made from a value that is already
    equal on all ranks, such as the global gradient norm, and then the scale is equal too.

    `good_steps`: good updates since the scale last changed. `skipped`: updates skipped so far.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = config.name == "fp16"
        self.scale = float(config.initial_loss_scale) if self.dynamic else 1.0
        self.good_steps = 0
        self.skipped = 0
        self._window = config.loss_scale_window
        self._min_scale = float(config.min_loss_scale)
        self._overflowed_at_minimum = False

    @property
    def exhausted(self) -> bool:
        """The last update overflowed at the smallest scale: the values themselves are not finite.

        Lowering the scale cannot help any more, so this is a non-finite gradient like one in fp32.
        """
        return self._overflowed_at_minimum

    def update(self, *, ok: bool) -> None:
        """Record that an update was made (`ok`) or overflowed and was skipped; adapt the scale."""
        self._overflowed_at_minimum = not ok and self.dynamic and self.scale <= self._min_scale
        if not ok:
            self.skipped += 1
            self.good_steps = 0
            if self.dynamic:
                self.scale = max(self.scale / 2, self._min_scale)
            return
        self.good_steps += 1
        if self.dynamic and self.good_steps >= self._window:
            self.scale *= 2
            self.good_steps = 0

    def skip(self) -> None:
        """Record that an update was skipped though nothing overflowed."""
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for the training state of a checkpoint."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        A scale is only taken over between two fp16 runs: coming from another precision an fp16 run
        starts from its own initial scale, and fp32 and bf16 stay at 1.
        """
        self.skipped = int(state["skipped"])
        if self.dynamic == bool(state["dynamic"]):
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
