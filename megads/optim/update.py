"""Update rules on flat fp32 tensors: what an optimizer does to the slice of the model it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megads.config.schema import OptimConfig


@dataclass(frozen=True)
class Update:
    """What one update shares over all tensors.

    `step` counts updates from 1. Gradients are divided by `grad_scale` (a scalar tensor) before
    use.
    """

    step: int
    lr: float
    weight_decay: float = 0.0
    grad_scale: Tensor | None = None


class UpdateRule(Protocol):
    """`state_names` are the tensors kept per parameter, as large as the parameter, in fp32."""

    state_names: tuple[str, ...]

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        update: Update,
    ) -> None:
        """Update `params` in place; `states[i]` are the tensors of `state_names[i]`."""


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) and bias correction."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimConfig, kernel: Callable[..., None]) -> None:
        self._betas, self._eps, self._kernel = config.betas, config.eps, kernel

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        update: Update,
    ) -> None:
        self._kernel(
            list(params),
            list(grads),
            list(states[0]),
            list(states[1]),
            step=update.step,
            lr=update.lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            eps=self._eps,
            weight_decay=update.weight_decay,
            grad_scale=update.grad_scale,
        )


class SGD:
    """Gradient descent with decoupled weight decay and, if asked for, heavy-ball momentum.

    momentum <- m x momentum + grad; param <- param x (1 - lr x weight_decay) - lr x momentum.
    """

    def __init__(self, config: OptimConfig) -> None:
        self._momentum = config.momentum
        self.state_names: tuple[str, ...] = ("momentum",) if config.momentum else ()

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        update: Update,
    ) -> None:
        weights, directions = list(params), list(grads)
        if update.grad_scale is not None:
            torch._foreach_div_(directions, update.grad_scale)
        if update.weight_decay:
            torch._foreach_mul_(weights, 1 - update.lr * update.weight_decay)
        if self._momentum:
            momenta = list(states[0])
            torch._foreach_mul_(momenta, self._momentum)
            torch._foreach_add_(momenta, directions)
            directions = momenta
        torch._foreach_add_(weights, directions, alpha=-update.lr)


def make_update_rule(config: OptimConfig, adamw_kernel: Callable[..., None]) -> UpdateRule:
    """The rule `optim.name` asks for; AdamW runs through the kernel chosen for this device."""
    return AdamW(config, adamw_kernel) if config.name == "adamw" else SGD(config)
