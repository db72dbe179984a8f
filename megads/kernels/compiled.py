"""torch.compile of the block's pointwise chains.

The first call of each op compiles, which takes seconds; ops that are one library call already
(attention, cross entropy, the optimizer) are not here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from megads.kernels import reference, torch_native


def why_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing can be compiled for `device`; None if it can."""
    if device.type == "cpu":
        if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return "torch.compile needs a C++ compiler (g++ or clang++) on the PATH"
        return None
    if not has_triton():
        return "torch.compile needs triton for this device"
    return None


def operations() -> dict[str, Callable[..., Any]]:
    """The ops of this backend (COMPILED_OPERATIONS of the configuration's schema), freshly wrapped;
    compilation happens at their first call."""
    joined = torch.compile(_join, dynamic=True)

    def residual(
        x: Tensor, stream: Tensor | None, *, dropout: float = 0.0, seed: int = 0
    ) -> Tensor:
        # Seeded generators cannot be compiled.
        if dropout or stream is None:
            return torch_native.residual(x, stream, dropout=dropout, seed=seed)
        result: Tensor = joined(x, stream)
        return result

    return {
        "norm": torch.compile(reference.norm, dynamic=True),
        "activation": torch.compile(reference.activation, dynamic=True),
        "rotary": torch.compile(reference.rotary, dynamic=True),
        "residual": residual,
    }


def _join(x: Tensor, stream: Tensor) -> Tensor:
    return stream + x
