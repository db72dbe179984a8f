"""The orders in which other software stores fused projections, and the canonical one.

Tensors are weights `[rows, in]` or biases `[rows]` of the whole model: tensor-parallel shards are
concatenated first. Canonical is `[all q heads; all k heads; all v heads]`. "Grouped" is, for each
KV head, its query heads, the key head and the value head; without grouped KV heads that is q, k, v
of each head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megads.config.model import ModelConfig


def from_grouped(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Grouped rows -> canonical."""
    q, k, v = _group_view(tensor, model).split([_queries(model), 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in (q, k, v)])


def to_grouped(tensor: Tensor, model: ModelConfig) -> Tensor:
    """Canonical rows -> grouped."""
    heads, groups, width = model.num_attention_heads, model.num_kv_heads, model.head_dim
    parts = tensor.split([heads * width, groups * width, groups * width])
    views = [part.unflatten(0, (groups, -1, width)) for part in parts]
    return torch.cat(views, dim=1).flatten(0, 2)


def in_sections(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Parts with one section each of `rows` -> the first section of all parts, then the second.

    Raises RuntimeError if a part has not so many rows.
    """
    sections = zip(*(part.split(list(rows)) for part in parts), strict=True)
    return torch.cat([torch.cat(section) for section in sections])


def _queries(model: ModelConfig) -> int:
    return model.num_attention_heads // model.num_kv_heads


def _group_view(tensor: Tensor, model: ModelConfig) -> Tensor:
    """`[groups, heads of the group, head_dim, ...]`."""
    return tensor.unflatten(0, (model.num_kv_heads, _queries(model) + 2, model.head_dim))
