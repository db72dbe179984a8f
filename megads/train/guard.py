"""Is a step good? Judged by its loss and gradient norm alone. Pure: no torch."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from megads.config.schema import TrainConfig

Verdict = Literal["good", "nonfinite", "spike"]


class Guard:
    """Judges each step by the good ones before it.

    A spike is a loss above `train.spike_loss` times the median of the last `train.spike_window`
    good steps, or a gradient norm above `train.spike_norm` times theirs; before there are so many,
    and while a median is 0, nothing is one. Loss and norm are equal on all ranks and for every
    layout, so verdicts are too. `spikes_in_a_row` counts those since the last good step.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self.spikes_in_a_row = 0

    def judge(self, loss: float, norm: float) -> Verdict:
        """What the next step is; a good one is remembered."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nonfinite"
        if self._config.spike != "off" and (
            _exceeds(loss, self._config.spike_loss, self._losses)
            or _exceeds(norm, self._config.spike_norm, self._norms)
        ):
            self.spikes_in_a_row += 1
            return "spike"
        self.spikes_in_a_row = 0
        self._losses.append(loss)
        self._norms.append(norm)
        return "good"

    @property
    def is_new_level(self) -> bool:
        """So many spikes in a row that they are the usual thing now: no good step will follow."""
        return self.spikes_in_a_row >= self._config.spike_window

    def medians(self) -> str:
        """What is usual, in words; empty before there is anything."""
        if not self._losses:
            return ""
        return (
            f"medians of the last {len(self._losses)} good steps: loss {median(self._losses):.4g}, "
            f"gradient norm {median(self._norms):.4g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for the training state of a checkpoint."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "spikes_in_a_row": self.spikes_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; of a longer window the last steps count."""
        window = self._config.spike_window
        self._losses = deque(map(float, state["losses"]), maxlen=window)
        self._norms = deque(map(float, state["norms"]), maxlen=window)
        self.spikes_in_a_row = int(state["spikes_in_a_row"])


def _exceeds(value: float, factor: float | None, before: deque[float]) -> bool:
    if factor is None or len(before) < (before.maxlen or 0):
        return False
    usual = median(before)
    return 0 < usual * factor < value
