"""The device and the number type that a command line names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megads.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("fp32", "bf16", "fp16")


def chosen_device(name: str | None) -> torch.device:
    """The device called `name`, else the GPU if there is one.

    Raises ConfigError for a device that is unknown or not there.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}") from error
    return device


def chosen_dtype(name: str | None) -> torch.dtype | None:
    """The number type called `name`, one of DTYPES."""
    import torch

    types = (torch.float32, torch.bfloat16, torch.float16)
    return None if name is None else dict(zip(DTYPES, types, strict=True))[name]
