"""The ops of a transformer block, and the choice of who computes each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.config.schema import COMPILED_OPERATIONS, KernelsConfig
from megads.errors import KernelUnavailable
from megads.kernels import compiled, reference, torch_native
from megads.kernels.types import CrossEntropy

OPERATIONS = (
    "norm",
    "activation",
    "rotary",
    "attention",
    "residual",
    "cross_entropy",
    "optimizer",
)
AUTO_ORDER = ("torch", "compiled", "reference")
"""What `auto` tries first.

Measured forward and backward on one CPU core that other programs used too (1024 tokens of width
512, fp32 and bf16, torch 2.13). reference is slower than torch in the sum of all ops, up to 12
times (LayerNorm). compiled, which has four ops, takes 2 to 3 times as long as torch for LayerNorm
and rotary, 0.6 to 0.75 of its time for SwiGLU, much the same for the rest, and seconds more at the
start. GPUs have not been measured.
"""


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op; `megads.kernels.reference` defines what each computes.

    `norm(x, weight, bias | None, eps)`: LayerNorm, or RMSNorm without a bias.
    `activation(x, kind)`: of the MLP; gated kinds halve the width.
    `rotary(x, cos, sin, *, head_dim, heads)`: may work in place on x `[tokens, width]`.
    `attention(q, k, v, pattern, *, documents, dropout, seed)`: `[seq, batch, heads, d]` in,
    `[seq, batch, heads * d]` out; inside of `documents`, if they are given.
    `residual(x, stream | None, *, dropout, seed)`: stream + dropout(x); may work in place on x.
    `cross_entropy`: the local halves of the loss, see `CrossEntropy`.
    `adamw(params, grads, exp_avgs, exp_avg_sqs, *, step, lr, ...)`: flat fp32 tensors, in place.
    """

    norm: Callable[..., Tensor]
    activation: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    residual: Callable[..., Tensor]
    cross_entropy: CrossEntropy
    adamw: Callable[..., None]


@dataclass(frozen=True)
class Backend:
    """The ops it has, how to get them, and why it cannot run on a device in a dtype (None: it
    can)."""

    provides: tuple[str, ...]
    operations: Callable[[], dict[str, Any]]
    why_unavailable: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


def _module_operations(module: Any, cross_entropy: CrossEntropy) -> dict[str, Any]:
    return {
        "norm": module.norm,
        "activation": module.activation,
        "rotary": module.rotary,
        "attention": module.attention,
        "residual": module.residual,
        "cross_entropy": cross_entropy,
        "optimizer": module.adamw,
    }


def backends() -> dict[str, Backend]:
    """All backends by name."""
    return {
        "reference": Backend(
            OPERATIONS, lambda: _module_operations(reference, reference.ReferenceCrossEntropy())
        ),
        "torch": Backend(
            OPERATIONS, lambda: _module_operations(torch_native, torch_native.InPlaceCrossEntropy())
        ),
        "compiled": Backend(COMPILED_OPERATIONS, compiled.operations, compiled.why_unavailable),
    }


def select_kernels(
    config: KernelsConfig, device: torch.device | str, dtype: torch.dtype
) -> tuple[Kernels, dict[str, str]]:
    """Kernels for `config`, and the backend of each op for the log.

    An op's own setting goes before `config.name`; a backend named for all ops leaves those it does
    not have to `auto`, which takes the first of AUTO_ORDER that has the op and can run. Raises
    KernelUnavailable, naming the choices, for a backend that cannot run on `device`, or one asked
    for an op that it does not have.
    """
    known, device = backends(), torch.device(device)
    report = {op: _choose(config, op, known, device, dtype) for op in OPERATIONS}
    opened: dict[str, dict[str, Any]] = {}
    for name in report.values():
        if name not in opened:
            opened[name] = known[name].operations()
    chosen = {operation: opened[name][operation] for operation, name in report.items()}
    chosen["adamw"] = chosen.pop("optimizer")
    return Kernels(**chosen), report


def _choose(
    config: KernelsConfig,
    operation: str,
    known: dict[str, Backend],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """The backend that the configuration means for `operation`."""
    own = getattr(config, operation)
    key, name = ("kernels", config.name) if own == "auto" else (f"kernels.{operation}", own)
    able = [n for n in AUTO_ORDER if operation in known[n].provides]
    if name in able:
        if reason := known[name].why_unavailable(device, dtype):
            raise KernelUnavailable(f"{key}={name} cannot run here: {reason}")
        return name
    if own != "auto":
        raise KernelUnavailable(
            f"{key}={name}: this backend does not have the op; choose one of auto, "
            f"{', '.join(able)}"
        )
    return next(n for n in able if not known[n].why_unavailable(device, dtype))
