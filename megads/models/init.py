"""Initial weights that do not depend on the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megads.parallel.rng import derive_seed, generator
from megads.parallel.sharding import ParamSpec

_BLOCK_ELEMENTS = 1 << 20


@torch.no_grad()
def initialize_parameter(
    local: Tensor, spec: ParamSpec, *, seed: int, tp: int, tp_index: int
) -> None:
    """Fill tensor-parallel rank `tp_index`'s piece `local` of a parameter, in place.

    The global tensor is drawn in blocks of rows whose size depends on its shape alone, each from a
    seed derived from the run's seed, the canonical name and the block's number, in fp32 on the CPU.
    Every layout, device and dtype starts from slices of the same draws, and a rank that holds some
    rows draws only the blocks they are in. Vocabulary padding is zero.
    """
    if spec.init.kind != "normal":
        local.fill_(1.0 if spec.init.kind == "ones" else 0.0)
        if spec.pad_multiple:
            raise ValueError(f"{spec.name}: a padded parameter starts from normal draws")
        return
    local.zero_()
    columns = slice(None)
    rows = [(0, 0, spec.shape[0])]
    if spec.tp_dim == 0:
        rows = [(s.start, s.local_start, s.length) for s in spec.slabs(tp, tp_index)]
    elif spec.tp_dim == 1:
        (slab,) = spec.slabs(tp, tp_index)
        columns = slice(slab.start, slab.start + slab.length)
    height = _block_rows(spec)
    for start, local_start, length in rows:
        for block in range(start // height, -(-(start + length) // height)):
            first = block * height
            low, high = max(start, first), min(start + length, first + height)
            drawn = _draw(spec, seed, block)[low - first : high - first]
            target = local[low - start + local_start : high - start + local_start]
            target.copy_(drawn[:, columns] if drawn.dim() > 1 else drawn)


def _block_rows(spec: ParamSpec) -> int:
    return max(1, _BLOCK_ELEMENTS // (spec.numel // spec.shape[0]))


def _draw(spec: ParamSpec, seed: int, block: int) -> Tensor:
    """Rows [block * height, ...) of the global tensor."""
    height = _block_rows(spec)
    rows = min(height, spec.shape[0] - block * height)
    source = generator(derive_seed(seed, spec.name, block))
    drawn = torch.empty((rows, *spec.shape[1:]), dtype=torch.float32)
    return drawn.normal_(0.0, spec.init.std, generator=source)
