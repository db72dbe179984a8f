"""A model of three units for ZeRO, and the same model trained by torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megads.config.schema import OptimConfig
from megads.parallel.sharding import Init, ParamSpec, Role
from megads.parallel.units import UnitHooks, after_unit, before_unit

SHAPES = {
    "e": (97, 53),
    "a": (7,),
    "b": (5, 3),
    "c": (1,),
    "d": (13,),
    "unused": (2, 2),
    "frozen": (2, 3),
}
"""Some are smaller than the number of ranks, so that some shards hold padding only."""
ROLES: dict[str, Role] = {
    "e": "embedding",
    "a": "bias",
    "b": "matrix",
    "c": "norm",
    "d": "bias",
    "unused": "matrix",
    "frozen": "matrix",
}
DECAYS = ("e", "b", "unused")
UNITS = {"embedding": ("e",), "middle": ("a", "b"), "head": ("c", "d", "unused", "frozen", "e")}
SAMPLES, STEPS = 8, 4


class Toy(nn.Module):
    """A sum of losses of samples. "d" takes part for some samples only, "e" in two units."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            param = torch.empty(shape, dtype=dtype, device="meta")
            setattr(self, name, nn.Parameter(param, requires_grad=name != "frozen"))
        self.specs = {n: ParamSpec(n, SHAPES[n], ROLES[n], Init()) for n in SHAPES}
        self.units = UNITS
        self.unit_hooks: UnitHooks | None = None
        self.on_unit: Callable[[str], None] = lambda unit: None

    def forward(self, x: Tensor) -> Tensor:
        """The sum over samples, the rows of `x`."""
        x = x.to(self.e.dtype)
        self._begin("embedding")
        h = torch.tanh(x @ self.e.t() / 8)
        after_unit("embedding", h, self.unit_hooks)
        self._begin("middle")
        y = h[:, :5, None] * self.a[:3] * self.b + h[:, 5:20].view(-1, 5, 3)
        after_unit("middle", y, self.unit_hooks)
        self._begin("head")
        loss = (y.sum() + (y[:, :2] * self.frozen).sum()) * self.c.sum()
        loss = loss + torch.outer(x[:, :5].sum(1), self.e[:, 0]).pow(2).sum() / 50
        some = x[x[:, 0] > 0.7, :13]
        if len(some):
            loss = loss + (some * self.d).pow(2).sum()
        loss = loss.float()
        after_unit("head", loss, self.unit_hooks)
        return loss

    def _begin(self, unit: str) -> None:
        before_unit(unit, self.unit_hooks)
        self.on_unit(unit)


def weights_in_use(model: Toy) -> dict[str, Tensor]:
    """The parameters that a forward pass reads, which under stage 3 are there only then."""
    seen: dict[str, Tensor] = {}

    def look(unit: str) -> None:
        for name in UNITS[unit]:
            value = getattr(model, name).detach().clone()
            assert torch.equal(seen.setdefault(name, value), value), f"{name} has two values"

    model.on_unit = look
    with torch.no_grad():
        model(samples(0, range(1)))
    model.on_unit = lambda unit: None
    return seen


def values(name: str) -> Tensor:
    """The first value of a parameter."""
    source = torch.Generator().manual_seed(len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=source)


def samples(step: int, indices: range) -> Tensor:
    """`[samples, 53]`."""
    sources = [torch.Generator().manual_seed(1000 * step + index) for index in indices]
    return torch.stack([torch.randn(53, generator=source) for source in sources])


def dense(config: OptimConfig) -> dict[str, Tensor]:
    """Parameters after training with torch's optimizer, and the "norms" of the gradients."""
    model = Toy()
    params = {n: nn.Parameter(values(n), requires_grad=n != "frozen") for n in SHAPES}
    for name, param in params.items():
        setattr(model, name, param)
    optimizer = dense_optimizer(config, params)
    trained = [p for p in params.values() if p.requires_grad]
    norms = []
    for step in range(STEPS):
        loss = model(samples(step, range(SAMPLES))) / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        for param in trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(nn.utils.clip_grad_norm_(trained, config.clip))
        optimizer.step()
    return {n: p.detach() for n, p in params.items()} | {"norms": torch.stack(norms)}


def dense_optimizer(
    config: OptimConfig, params: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    if config.name == "sgd":
        trained = [p for p in params.values() if p.requires_grad]
        return torch.optim.SGD(trained, lr=config.lr, momentum=config.momentum)
    groups = [
        {"params": [params[n] for n in DECAYS], "weight_decay": config.weight_decay},
        {"params": [params[n] for n in ("a", "c", "d")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
