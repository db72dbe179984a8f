"""The names that a pickled checkpoint may use, and what they stand for here.

Nothing of these is the real thing: functions are written anew and check what they are given, and
classes are stand-ins. The list is closed; `look_up` refuses all else.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.errors import CheckpointError


class Inert:
    """Stands in for an object of a class that is not here: holds its arguments and attributes.

    `path`: the class's name with its module. A state that is no dictionary is kept as `state`.
    """

    path = ""
    args: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.__dict__.update(kwargs)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        with_slots = isinstance(state, tuple) and len(state) == 2
        parts = state if with_slots else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.state = state


@dataclass(frozen=True)
class StorageType:
    """Stands for the class of a storage: the type of its elements."""

    dtype: torch.dtype


def look_up(module: str, name: str) -> Any:
    """What stands for `module.name`; raises CheckpointError if it is not allowed."""
    if module in ("__builtin__", "builtins"):
        module = "builtins"
    if (module, name) in _NAMES:
        return _NAMES[module, name]
    if (module, name) in _CLASSES or module.partition(".")[0] in _FOREIGN:
        return _stand_in(module, name)
    if module == "signal" and _SIGNAL.fullmatch(name):
        return _stand_in(module, name)()
    raise CheckpointError(f"refused: the file asks for {module}.{name}")


def _stand_in(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"path": f"{module}.{name}"})


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage's elements; it may not reach beyond them, nor be larger than they are."""
    if not isinstance(storage, Tensor) or not all(
        isinstance(n, int) and n >= 0 for n in (offset, *size, *stride)
    ):
        raise CheckpointError("refused: a tensor with negative or unfit sizes")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    numel = math.prod(size)
    if numel > len(storage) or (numel and last >= len(storage)):
        raise CheckpointError(
            f"refused: a tensor of shape {tuple(size)} in a storage of {len(storage)} elements"
        )
    return storage.as_strided(tuple(size), tuple(stride), offset)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise CheckpointError("refused: a parameter that is no tensor")
    return data


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Tensor:
    """A tensor with attributes of its own, which are left out."""
    if function is not _tensor:
        raise CheckpointError("refused: a tensor that is made by another function")
    return _tensor(*args)


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((_key(key), value) for key, value in pairs)


def _defaulting(*_: Any) -> dict[Any, Any]:
    return {}


def _set(items: Any = ()) -> set[Any]:
    return {_key(item) for item in items}


def _key(value: Any) -> Any:
    """`value` if it can be hashed at once."""
    if value is not None and not isinstance(value, str | int | float | bytes | Inert):
        raise CheckpointError(f"refused: a {type(value).__name__} as a key")
    return value


def _number(kind: type[int] | type[float] | type[bool]) -> Callable[..., Any]:
    def make(value: Any = 0) -> Any:
        if not isinstance(value, str | int | float):
            raise CheckpointError(f"refused: a number made of a {type(value).__name__}")
        return kind(value)

    return make


def _list(items: Any = ()) -> list[Any]:
    return list(items)


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    return dict(_ordered(pairs.items() if isinstance(pairs, dict) else pairs))


def _bytes(text: Any, encoding: Any) -> bytes:
    """How pickles of protocol 2 hold bytes: as text, one character for each."""
    if not isinstance(text, str) or encoding != "latin1":
        raise CheckpointError("refused: bytes that are no text of latin1")
    return text.encode("latin1")


def _size(items: Any = ()) -> tuple[int, ...]:
    return tuple(int(n) for n in items)


def _word(*parts: Any) -> tuple[Any, ...]:
    return parts


_NUMPY = {
    "f2": "<e",
    "f4": "<f",
    "f8": "<d",
    "b1": "<?",
    "i1": "<b",
    "u1": "<B",
    "i2": "<h",
    "u2": "<H",
    "i4": "<i",
    "u4": "<I",
    "i8": "<q",
    "u8": "<Q",
}


def _scalar(dtype: Any, data: Any = b"") -> Any:
    """A number of NumPy's, as Python's; of another kind, as the bytes it has."""
    code = _NUMPY.get(dtype.args[0]) if isinstance(dtype, Inert) and dtype.args else None
    if code is None or not isinstance(data, bytes) or len(data) != struct.calcsize(code):
        return data
    return struct.unpack(code, data)[0]


_FOREIGN = ("megatron", "deepspeed", "transformer_engine", "apex")
"""Packages of which every class is stood in for."""

_SIGNAL = re.compile(r"SIG[A-Z0-9_]+")
"""Members of `signal.Signals`, as Pythons that pickle them by name do."""

_CLASSES = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("signal", "Signals"),
    ("pathlib", "PosixPath"),
    ("_io", "BytesIO"),
} | {
    (f"torch.distributed.checkpoint.{module}", name)
    for module, names in {
        "metadata": (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            "_MEM_FORMAT_ENCODING",
        ),
        "filesystem": ("_StorageInfo",),
        "planner": (
            *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
            "BytesIOWriteData",
        ),
    }.items()
    for name in names
}
_CLASSES |= {
    ("torch.distributed._shard.sharded_tensor.metadata", name)
    for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
}
_CLASSES |= {("numpy", "dtype"), ("numpy", "ndarray")} | {
    (f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")
}
"""Other classes that are stood in for. Arrays of NumPy are only met in states of generators."""

_NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _defaulting,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch", "Size"): _size,
    ("torch", "device"): _word,
    ("torch", "Tensor"): "torch.Tensor",
    ("torch.nn.parameter", "Parameter"): "torch.nn.parameter.Parameter",
    ("torch.serialization", "_get_layout"): _word,
    ("_codecs", "encode"): _bytes,
    ("builtins", "set"): _set,
    ("builtins", "int"): _number(int),
    ("builtins", "float"): _number(float),
    ("builtins", "bool"): _number(bool),
    ("builtins", "list"): _list,
    ("builtins", "dict"): _dict,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("torch.storage", "UntypedStorage"): StorageType(torch.uint8),
} | {
    ("torch", name): getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_NAMES |= {  # type: ignore[operator]
    ("torch", f"{name}Storage"): StorageType(dtype)
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}

FUNCTIONS = frozenset(value for value in _NAMES.values() if callable(value))
"""All that a file may have called, besides stand-ins."""
