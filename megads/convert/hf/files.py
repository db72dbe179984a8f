"""The tensors in the files of a Hugging Face model: safetensors or `pytorch_model.bin`, whole or
sharded with an index.

A tensor is read from a mapping that lives no longer than the tensor, so that no more than what is
being worked on is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.convert.hf.names import Shape
from megads.convert.pickles import load_pickle
from megads.errors import CheckpointError

CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where the weights are, the first that exists."""
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; `dtype` None: of a type that weights cannot have, called `type_name`."""

    file: Path
    shape: Shape
    dtype: torch.dtype | None
    type_name: str


def has_weights(directory: Path) -> bool:
    """Whether there is one of the files with weights."""
    return any((directory / name).is_file() for name in CANDIDATES)


def list_tensors(directory: Path) -> dict[str, Entry]:
    """All tensors by name; data is not read.

    Raises CheckpointError naming a file that is missing or damaged, or a name that is there twice
    or not at all.
    """
    for name in CANDIDATES:
        path = directory / name
        if path.is_file():
            break
    else:
        raise CheckpointError(f"no weights in {directory}: none of {', '.join(CANDIDATES)}")
    index = _read_index(path) if path.suffix == ".json" else {}
    files = sorted(set(index.values())) or [path.name]
    entries: dict[str, Entry] = {}
    for file in files:
        for tensor, entry in _list_file(directory / file):
            if tensor in entries:
                raise CheckpointError(f"{tensor} is in {entries[tensor].file} and in {entry.file}")
            entries[tensor] = entry
    for tensor, file in index.items():
        if tensor not in entries or entries[tensor].file.name != file:
            raise CheckpointError(f"{path} says that {tensor} is in {file}, but it is not")
    return entries


def read_tensor(entry: Entry, name: str) -> Tensor:
    """The data of an entry, a view of its file. Raises CheckpointError naming both."""
    if entry.file.suffix == ".bin":
        tensor: Tensor = load_pickle(entry.file)[name]
        return tensor.detach()
    try:
        with safe_open(entry.file, framework="pt") as file:
            data: Tensor = file.get_tensor(name)
            return data
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {name} of {entry.file}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data


def _read_index(path: Path) -> Mapping[str, str]:
    """Tensor name -> file name; only files beside the index are accepted."""
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path} has no weight_map")
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: {name} is in {file!r}, which is no file beside it")
    return table


def _list_file(path: Path) -> Iterator[tuple[str, Entry]]:
    if path.suffix == ".bin":
        yield from _list_pickle(path)
        return
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                yield name, Entry(path, tuple(part.get_shape()), FLOATS.get(code), code)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _list_pickle(path: Path) -> Iterator[tuple[str, Entry]]:
    table = load_pickle(path)
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds a {type(table).__name__}, not a table of tensors")
    for name, tensor in table.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
        dtype = tensor.dtype if tensor.dtype in FLOATS.values() else None
        yield name, Entry(path, tuple(tensor.shape), dtype, str(tensor.dtype))
