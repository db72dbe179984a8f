"""Update rules against torch's own optimizers, and against one step worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megads.config.schema import OptimConfig
from megads.kernels.reference import adamw
from megads.optim.update import SGD, AdamW, Update, UpdateRule, make_update_rule

SIZES = (1, 7, 64, 1003, 0)
"""An empty slice is what a rank owns of a bucket that holds only padding there."""
RATES = (0.05, 0.1, 0.1, 0.03, 0.0, 0.07)


def normal(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=source, dtype=dtype) for n in SIZES]


def run(
    rule: UpdateRule, *, weight_decay: float, scale: float | None = None, first_step: int = 1
) -> list[Tensor]:
    """Parameters after as many updates as RATES has, with gradients given `scale` times too big."""
    params = normal(0)
    states = [[torch.zeros_like(p) for p in params] for _ in rule.state_names]
    for i, lr in enumerate(RATES):
        grads = normal(100 + i)
        if scale is not None:
            grads = [g * scale for g in grads]
        divisor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
        rule(params, grads, states, Update(first_step + i, lr, weight_decay, divisor))
    return params


def run_torch(
    make: type[torch.optim.Optimizer], *, decay: float = 0.0, **kw: object
) -> list[Tensor]:
    """The same with an optimizer of torch; `decay` is applied by hand before each update."""
    params = normal(0)
    optimizer = make(params, lr=0.0, **kw)  # type: ignore[call-arg]
    for i, lr in enumerate(RATES):
        for param, grad in zip(params, normal(100 + i), strict=True):
            param.mul_(1 - lr * decay)
            param.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return params


def close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-11, atol=1e-13) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("scale", [None, 1024.0, 0.3])
def test_sgd(momentum: float, decay: float, scale: float | None) -> None:
    rule = SGD(OptimConfig(name="sgd", momentum=momentum))
    expected = run_torch(torch.optim.SGD, momentum=momentum, decay=decay)
    assert close(run(rule, weight_decay=decay, scale=scale), expected)


def test_negative_control_sgd() -> None:
    """Decay added to the gradient, Nesterov's momentum and a damped one are other rules."""
    got = run(SGD(OptimConfig(name="sgd", momentum=0.9)), weight_decay=0.3)
    assert not close(got, run_torch(torch.optim.SGD, momentum=0.9, weight_decay=0.3))
    assert not close(got, run_torch(torch.optim.SGD, momentum=0.9, decay=0.3, nesterov=True))
    assert not close(got, run_torch(torch.optim.SGD, momentum=0.9, decay=0.3, dampening=0.1))


def test_two_updates_of_sgd_by_hand() -> None:
    """momentum 1, then 0.5 x 1 + 3 = 3.5; decay takes a tenth of the weight before each."""
    param, momentum = torch.tensor([10.0]), torch.zeros(1)
    rule = SGD(OptimConfig(name="sgd", momentum=0.5))
    for step, (grad, expected) in enumerate([(1.0, 8.5), (3.0, 5.9)], start=1):
        rule([param], [torch.tensor([grad])], [[momentum]], Update(step, 0.5, 0.2))
        assert param.item() == pytest.approx(expected)
    assert momentum.item() == 3.5


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.8, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("scale", [None, 1024.0, 0.3])
def test_adamw(betas: tuple[float, float], decay: float, scale: float | None) -> None:
    rule = AdamW(OptimConfig(betas=betas, eps=1e-3), adamw)
    expected = run_torch(
        torch.optim.AdamW, betas=betas, eps=1e-3, weight_decay=decay, foreach=False
    )
    assert close(run(rule, weight_decay=decay, scale=scale), expected)


def test_negative_control_adamw() -> None:
    """Adam with decay in the gradient, another eps, and a step counted from 2 are noticed."""
    rule = AdamW(OptimConfig(eps=1e-3), adamw)
    got = run(rule, weight_decay=0.3)
    right = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.3}
    assert close(got, run_torch(torch.optim.AdamW, **right))
    assert not close(got, run_torch(torch.optim.Adam, **right))
    assert not close(got, run_torch(torch.optim.AdamW, **{**right, "eps": 1.1e-3}))
    assert not close(got, run(rule, weight_decay=0.3, first_step=2))


def test_fp32_is_as_close_as_fp32_can_be() -> None:
    params = normal(0, torch.float32)
    expected = [p.clone() for p in params]
    optimizer = torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    rule = AdamW(OptimConfig(), adamw)
    for step in range(1, 21):
        grads = normal(step, torch.float32)
        for param, grad in zip(expected, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        rule(params, grads, states, Update(step, 0.01, 0.1))
    for param, want in zip(params, expected, strict=True):
        torch.testing.assert_close(param, want, rtol=2e-6, atol=2e-7)


def test_states_that_a_rule_keeps() -> None:
    """What is kept per parameter decides the memory of a run and the keys of its checkpoints."""
    kept = {
        make_update_rule(config, adamw).state_names
        for config in (
            OptimConfig(),
            OptimConfig(name="sgd"),
            OptimConfig(name="sgd", momentum=0.9),
            OptimConfig(name="adamw", momentum=0.9),
        )
    }
    assert kept == {("exp_avg", "exp_avg_sq"), (), ("momentum",)}
