"""Pickled checkpoints, read without running anything that is in them.

`torch.save` writes pickles, which name classes and functions to be called. Here a name is looked
up in a list of harmless ones; classes of the software that wrote the file become inert stand-ins
that keep what they were given; any other name is refused.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray

from megads.errors import CheckpointError

_REAL: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("_codecs", "encode"): lambda text, encoding: str(text).encode("latin1"),
    ("builtins", "set"): set,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "bool"): bool,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
} | {
    (f"numpy.{core}.multiarray", name): getattr(multiarray, name)
    for core in ("core", "_core")
    for name in ("_reconstruct", "scalar")
}
_FOREIGN = ("megatron", "deepspeed", "argparse", "signal", "transformer_engine", "apex")
"""Packages whose classes are stood in for."""


class Inert:
    """Stands in for an object of a class that is not here: holds its arguments and attributes."""

    path = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def load_pickle(path: Path) -> Any:
    """What `torch.save` wrote to `path`; tensors are mapped, and read when they are touched.

    Raises CheckpointError for a file that cannot be read, or names something that is not allowed.
    """
    try:
        return torch.load(
            path,
            map_location="cpu",
            mmap=True,
            weights_only=False,
            pickle_module=SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__=__name__),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REAL:
            return _REAL[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _FOREIGN:
            return type(name, (Inert,), {"path": f"{module}.{name}"})
        raise CheckpointError(f"refused: the file asks for {module}.{name}")


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()
