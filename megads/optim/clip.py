"""The global gradient norm, accurate enough that every layout computes the same one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megads.parallel import collectives
from megads.parallel.mesh import Mesh

ROW = 256
"""Elements that are summed in fp32 before fp64 takes over."""


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of a 1-D fp32 tensor, as an fp64 scalar.

    Torch's fp32 norm of 16 million elements is off by 6e-4 on a CPU, which would make clipping
    depend on how the model is cut. Short rows in fp32 and their sum in fp64 cost the same and are
    exact to 1e-7, for values that spread over many orders of magnitude too.
    """
    whole = flat.numel() // ROW * ROW
    total = flat[whole:].double().square().sum()
    if whole:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
        total = total + rows.double().square().sum()
    return total


def global_norm(unique: Sequence[Tensor], mesh: Mesh) -> float:
    """L2 norm over all ranks of 1-D tensors that together hold every element exactly once.

    Equal on all ranks; not finite if any element is not. A collective call.
    """
    total = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    for flat in unique:
        total += sum_of_squares(flat)
    return math.sqrt(collectives.reduced(total, mesh.world)[0])


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of norm `norm` are multiplied by to have at most norm `max_norm` (0: any)."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
