"""Units: the parts of a model chunk whose parameters are fetched and dropped together.

A unit is a transformer block, the embedding, or the final norm with the head. The model announces
each unit before it computes with it, forward and backward; ZeRO listens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class UnitHooks(Protocol):
    """Told by a model chunk which of its units is about to be computed."""

    def before_forward(self, unit: str) -> None:
        """The parameters of `unit` are about to be read."""

    def before_backward(self, unit: str) -> None:
        """The backward of `unit` is about to begin; that of all units after it has ended."""


def before_unit(unit: str, hooks: UnitHooks | None) -> None:
    """Announce the forward pass of `unit`."""
    if hooks is not None:
        hooks.before_forward(unit)


def after_unit(unit: str, output: Tensor, hooks: UnitHooks | None) -> None:
    """Mark the only output of `unit`, whose gradient is where the unit's backward begins."""
    if hooks is not None and torch.is_grad_enabled() and output.requires_grad:

        def announce(_: Tensor) -> None:
            hooks.before_backward(unit)

        output.register_hook(announce)
