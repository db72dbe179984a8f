"""Files of torch.distributed.checkpoint: global tensors, in chunks that lie in several files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.checkpoint.tiling import tiling_problem
from megads.convert.pickles import Inert, load_pickle, load_plain_pickle
from megads.convert.torch_files import Span
from megads.errors import CheckpointError

_MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the part of a file where it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    span: Span


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor by its chunks, as `.metadata` says."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a folder holds: tensors, and pickled objects by their names."""

    tensors: dict[str, GlobalTensor]
    objects: dict[str, Chunk]


def read_contents(folder: Path) -> Contents:
    """Read `.metadata`; raises CheckpointError if it is damaged or points out of `folder`."""
    path = folder / ".metadata"
    metadata = load_plain_pickle(path)
    try:
        places = {
            (key.fqn, _offset(key)): _place(folder, info)
            for key, info in metadata.storage_data.items()
        }
        tensors, objects = {}, {}
        for name, entry in metadata.state_dict_metadata.items():
            if entry.path == f"{_MODULE}.TensorStorageMetadata":
                tensors[name] = _tensor(name, entry, places)
            else:
                file, span = places[name, None]
                objects[name] = Chunk((), (), file, span)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not as torch.distributed.checkpoint writes it: "
            f"{type(error).__name__}: {error}"
        ) from None
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Contents(tensors, objects)


_Places = dict[tuple[str, tuple[int, ...] | None], tuple[Path, Span]]


def _offset(key: Inert) -> tuple[int, ...] | None:
    """Where a chunk is in its tensor; objects have no place, and may lack the attribute."""
    offset = vars(key).get("offset")
    return None if offset is None else _extent(offset)


def _place(folder: Path, info: Inert) -> tuple[Path, Span]:
    values = vars(info)
    name, offset, length = values["relative_path"], values["offset"], values["length"]
    if values.get("transform_descriptors"):
        raise CheckpointError(f"{name} is compressed or encrypted, which is not supported")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"refused: it names {name!r}, which is no file of {folder}")
    size = (folder / name).stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise CheckpointError(f"{name} ends at byte {size}, and should hold {length} from {offset}")
    return folder / name, Span(int(offset), int(length))


def _tensor(name: str, entry: Any, places: _Places) -> GlobalTensor:
    dtype = entry.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name} has no known type")
    shape = _extent(entry.size)
    boxes = [(_extent(chunk.offsets), _extent(chunk.sizes)) for chunk in entry.chunks]
    problem = tiling_problem(shape, boxes)
    if problem is not None:
        raise CheckpointError(f"the chunks of {name} do not make it up: {problem}")
    chunks = []
    for offset, extent in boxes:
        file, span = places[name, offset]
        if math.prod(extent) * dtype.itemsize > span.size:
            raise CheckpointError(f"{name}: a chunk of {extent} is not in {span.size} bytes")
        chunks.append(Chunk(offset, extent, file, span))
    return GlobalTensor(name, shape, dtype, tuple(chunks))


def _extent(numbers: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in numbers)


def read_box(tensor: GlobalTensor, layer: int | None) -> Tensor:
    """The whole tensor, or its part at index `layer` of dim 0; only chunks that it needs are read.

    That they fill it exactly is known since `.metadata` was read. Raises CheckpointError if one is
    not as that says.
    """
    shape = tensor.shape if layer is None else tensor.shape[1:]
    data = torch.empty(shape, dtype=tensor.dtype)
    for chunk in _needed(tensor.chunks, layer):
        part = load_pickle(chunk.file, chunk.span)
        if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (
            chunk.shape,
            tensor.dtype,
        ):
            raise CheckpointError(
                f"{chunk.file}: the chunk of {tensor.name} at {chunk.offset} should be "
                f"{chunk.shape} of {tensor.dtype}, and is not"
            )
        offset, extent = chunk.offset, chunk.shape
        if layer is not None:
            part = part[layer - offset[0]]
            offset, extent = offset[1:], extent[1:]
        box = tuple(slice(low, low + size) for low, size in zip(offset, extent, strict=True))
        data[box] = part
    return data


def _needed(chunks: Sequence[Chunk], layer: int | None) -> Iterable[Chunk]:
    for chunk in chunks:
        if layer is None or chunk.offset[0] <= layer < chunk.offset[0] + chunk.shape[0]:
            yield chunk
