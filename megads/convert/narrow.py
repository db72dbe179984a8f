"""From one type to another, without a number becoming infinite on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from megads.errors import CheckpointError

_CHUNK = 1 << 20


def retype(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`tensor` as `dtype`, rounded.

    Raises CheckpointError, with `name` and the value, if that makes infinite what was not.
    """
    result = tensor.to(dtype)
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or not result.numel():
        return result
    if not all(bool(bound.isfinite()) for bound in torch.aminmax(result)):
        _refuse(tensor.reshape(-1), result.reshape(-1), name)
    return result


def _refuse(before: Tensor, after: Tensor, name: str) -> None:
    """In chunks, as a tensor may be the largest of the model."""
    for old, new in zip(before.split(_CHUNK), after.split(_CHUNK), strict=True):
        lost = old.isfinite() & ~new.isfinite()
        if bool(lost.any()):
            wide, narrow = (str(t.dtype).removeprefix("torch.") for t in (old, new))
            raise CheckpointError(
                f"{name} holds {old[lost][0].item():g} in {wide}, which is infinite in {narrow}, "
                f"whose largest number is {torch.finfo(new.dtype).max:g}; choose a wider --dtype"
            )
