"""The tensors of Hugging Face models to canonical ones and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.fused import from_grouped, to_grouped
from megads.convert.hf.names import OFFSET, Stored
from megads.parallel.sharding import ParamSpec


def assemble(parts: Sequence[Tensor], stored: Stored, model: ModelConfig) -> Tensor:
    """The canonical tensor, contiguous, of the tensors that `stored` names."""
    if len(parts) > 1:
        return torch.cat(list(parts))
    (tensor,) = parts
    if stored.order == "transposed":
        tensor = tensor.t()
    elif stored.order == "grouped":
        tensor = from_grouped(tensor, model)
    elif stored.order == "offset":
        tensor = tensor[OFFSET:]
    return tensor.contiguous()


def take_apart(tensor: Tensor, stored: Stored, spec: ParamSpec, model: ModelConfig) -> list[Tensor]:
    """The tensors that `stored` names, of the canonical one.

    Rows that positions begin after are zero: no token that counts is ever at one of them (OPT gives
    row 1 to padding, row 0 to nothing).
    """
    if len(stored.names) > 1:
        return list(tensor.split([part.size for part in spec.parts]))
    if stored.order == "transposed":
        tensor = tensor.t()
    elif stored.order == "grouped":
        tensor = to_grouped(tensor, model)
    elif stored.order == "offset":
        tensor = torch.cat([tensor.new_zeros(OFFSET, *tensor.shape[1:]), tensor])
    return [tensor.contiguous()]
