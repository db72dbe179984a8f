"""Any source as a Hugging Face checkpoint: config.json and safetensors, sharded with an index.

One tensor is in memory at a time. A tied head is not stored; moments are not either, as the format
has no place for them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.checkpoint.directory import write_small
from megads.convert.hf.architectures import Architecture
from megads.convert.hf.config import TOKEN_IDS, choose_architecture, write_config
from megads.convert.hf.files import FLOATS, read_json
from megads.convert.hf.layout import take_apart
from megads.convert.hf.names import Shape, Stored
from megads.convert.hf.reader import CONFIG
from megads.convert.narrow import retype
from megads.convert.source import Report, Source, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.parallel.sharding import ParamSpec

_CODES = {dtype: code for code, dtype in FLOATS.items()}
_CHUNK = 16 << 20


@dataclass(frozen=True)
class _Planned:
    """A canonical tensor, and as what it is going to be written."""

    spec: ParamSpec
    stored: Stored
    dtype: torch.dtype

    @property
    def tensors(self) -> list[tuple[str, Shape]]:
        return list(zip(self.stored.names, self.stored.shapes(self.spec), strict=True))

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(shape, self.dtype) for _, shape in self.tensors)


def write(source: Source, target: Path, options: WriteOptions, report: Report) -> None:
    """Fill the directory `target`. Raises CheckpointError for a model no architecture has."""
    known = choose_architecture(source.model)
    plan = [
        _Planned(
            spec,
            known.names.stored(spec.name),
            source.weights_dtype(spec.name, options),
        )
        for spec in param_specs(source.model)
    ]
    shards = _split(plan, options.max_file_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_file(target / name, shard, source, report)
    if len(shards) > 1:
        _write_index(target, names, shards)
    _write_json(target / CONFIG, _config(source, known, plan))


def _config(source: Source, known: Architecture, plan: Sequence[_Planned]) -> dict[str, Any]:
    """With the token ids of the config.json that came along, if one did."""
    dtype = functools.reduce(torch.promote_types, (planned.dtype for planned in plan))
    data = write_config(known, source.model, str(dtype).removeprefix("torch."))
    for extra in source.extras:
        if extra.name == CONFIG:
            given = read_json(extra)
            data |= {key: given[key] for key in TOKEN_IDS if _are_ids(given.get(key), source)}
    return data


def _are_ids(value: Any, source: Source) -> bool:
    """Whether it is an id of the vocabulary, or several; transformers warns of any other."""
    ids = value if isinstance(value, list) else [value]
    return all(type(one) is int and 0 <= one < source.model.vocab_size for one in ids)


def _split(plan: Sequence[_Planned], limit: int) -> list[list[_Planned]]:
    """Files of at most `limit` bytes, or of one canonical tensor, in model order."""
    shards: list[list[_Planned]] = []
    filled = 0
    for planned in plan:
        if not shards or filled + planned.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(planned)
        filled += planned.nbytes
    # Within a file the widest items come first, so that all are aligned.
    return [sorted(shard, key=lambda planned: -planned.dtype.itemsize) for shard in shards]


def _write_file(path: Path, shard: Sequence[_Planned], source: Source, report: Report) -> None:
    with path.open("xb", buffering=0) as file:
        for block in _blocks(shard, source, report):
            for start in range(0, len(block), _CHUNK):
                chunk = block[start : start + _CHUNK]
                while chunk:  # a write may be short
                    chunk = chunk[file.write(chunk) or 0 :]
        os.fsync(file.fileno())


def _blocks(shard: Sequence[_Planned], source: Source, report: Report) -> Iterator[memoryview]:
    """A safetensors file in parts; each lives until the next is asked for."""
    yield memoryview(_header(shard))
    for planned in shard:
        name = planned.spec.name
        tensor = retype(source.tensor("param", name), planned.dtype, f"{source.path}: {name}")
        parts = take_apart(tensor, planned.stored, planned.spec, source.model)
        for part, (stored, shape) in zip(parts, planned.tensors, strict=True):
            if tuple(part.shape) != shape:
                raise CheckpointError(f"{stored} is {list(part.shape)} instead of {list(shape)}")
            yield _bytes(part)
        report("param", name)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(shard: Sequence[_Planned]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for planned in shard:
        for name, shape in planned.tensors:
            start, end = end, end + _nbytes(shape, planned.dtype)
            header[name] = {
                "dtype": _CODES[planned.dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(target: Path, names: Sequence[str], shards: Sequence[Sequence[_Planned]]) -> None:
    index = {
        "metadata": {"total_size": sum(planned.nbytes for shard in shards for planned in shard)},
        "weight_map": {
            tensor: name
            for name, shard in zip(names, shards, strict=True)
            for planned in shard
            for tensor in planned.stored.names
        },
    }
    _write_json(target / "model.safetensors.index.json", index)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_small(path, json.dumps(data, indent=2, sort_keys=True).encode() + b"\n")


def _nbytes(shape: Shape, dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
