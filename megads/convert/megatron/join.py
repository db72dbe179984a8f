"""Canonical tensors from the parts that tensor-parallel ranks of Megatron-LM hold, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.fused import from_grouped, in_sections, to_grouped
from megads.errors import CheckpointError
from megads.parallel.sharding import ParamSpec

QkvOrder = Literal["grouped", "thirds", "interleaved"]
"""Rows of `linear_qkv`. "grouped": see `fused`; "thirds": `[q; k; v]` of each rank (checkpoint
version 0); "interleaved": q, k and v of each row of each head (version 1.0)."""


def qkv_order(version: float) -> QkvOrder:
    """The order in files of a `checkpoint_version`."""
    if version == 0:
        return "thirds"
    if version == 1.0:
        return "interleaved"
    return "grouped"


def join(parts: Sequence[Tensor], spec: ParamSpec, model: ModelConfig, order: QkvOrder) -> Tensor:
    """The tensor `spec` of `parts`, which are in rank order.

    Raises CheckpointError if they cannot make it up, with their shapes and its.
    """
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1 or parts[0].ndim != len(spec.shape):
        raise CheckpointError(f"{spec.name} has shape {spec.shape}, its parts have {shapes}")
    if spec.tp_dim is None:
        for part in parts[1:]:
            if not torch.equal(part, parts[0]):
                raise CheckpointError(f"{spec.name} should be the same on all ranks, and differs")
        return _fitting(parts[0], spec).contiguous()
    fused = [part.name for part in spec.parts]
    if fused == ["gate", "up"] or (fused == ["q", "k", "v"] and order == "thirds"):
        return _fitting(in_sections(parts, _equal(parts[0].shape[0], len(fused))), spec)
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=spec.tp_dim)
    if spec.pad_multiple:
        return _fitting(whole[: spec.shape[0]], spec).contiguous()
    whole = _fitting(whole, spec)
    if fused != ["q", "k", "v"]:
        return whole.contiguous()
    if order == "interleaved":
        return _from_interleaved(whole, model)
    return from_grouped(whole, model)


def _equal(rows: int, count: int) -> list[int]:
    """Rows of each of `count` sections."""
    if rows % count:
        raise CheckpointError(f"{rows} rows are not {count} equal sections")
    return [rows // count] * count


def _fitting(whole: Tensor, spec: ParamSpec) -> Tensor:
    if tuple(whole.shape) != spec.shape:
        raise CheckpointError(
            f"{spec.name} should have shape {spec.shape}, and its parts make up "
            f"{tuple(whole.shape)}"
        )
    return whole


def _from_interleaved(whole: Tensor, model: ModelConfig) -> Tensor:
    """`[heads, head_dim, 3, ...]` -> `[3, heads, head_dim, ...]`."""
    view = whole.unflatten(0, (model.num_attention_heads, model.head_dim, 3))
    return view.movedim(2, 0).flatten(0, 2)


def part_shape(spec: ParamSpec, tp: int) -> tuple[int, ...]:
    """The shape of what `split` gives."""
    if spec.tp_dim is None:
        return spec.shape
    dim, rows = spec.tp_dim, spec.shape[spec.tp_dim] // tp
    if spec.pad_multiple:
        rows = spec.local_shape(tp)[dim]
    return (*spec.shape[:dim], rows, *spec.shape[dim + 1 :])


def split(whole: Tensor, spec: ParamSpec, model: ModelConfig, *, tp: int, rank: int) -> Tensor:
    """The part of a canonical tensor that a rank of Megatron core holds, in memory of its own.

    The sizes must be divisible; rows that pad the vocabulary are zero.
    """
    if spec.tp_dim is None:
        return whole.clone()
    fused = [part.name for part in spec.parts]
    if fused == ["gate", "up"]:
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    if spec.pad_multiple:
        rows = spec.local_shape(tp)[0]
        part = whole.new_zeros((rows, *whole.shape[1:]))
        held = whole[rank * rows : (rank + 1) * rows]
        part[: len(held)] = held
        return part
    if fused == ["q", "k", "v"]:
        whole = to_grouped(whole, model)
    return whole.chunk(tp, dim=spec.tp_dim)[rank].clone(memory_format=torch.contiguous_format)
