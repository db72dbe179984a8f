"""The weights of a checkpoint by DeepSpeed's pipeline engine: a file for each layer and rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.deepspeed.files import Opened, is_buffer, model_files
from megads.convert.deepspeed.optimizer import Partitions
from megads.convert.source import Kind
from megads.errors import CheckpointError

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"(?:layer|expert)_\d+_expert_\d+.*_model_states\.pt")
_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")


@dataclass(frozen=True)
class _Place:
    """A file with a layer's tensors; their names there begin with `prefix`."""

    path: Path
    prefix: str = ""


class PipelineShards:
    """Layer files for the weights, and the optimizer's files, if any, for masters and moments."""

    def __init__(self, folder: Path, opened: Opened, *, optimizer: bool) -> None:
        """Without `optimizer` its files are only taken if they are whole, and for the weights.

        Raises CheckpointError if files are missing or do not fit together.
        """
        self._opened = opened
        self._places = layer_files(folder) or _sequential(folder, opened)
        if not self._places:
            raise CheckpointError(
                f"{folder} has no layer_*-model_*-model_states.pt files: it is not of DeepSpeed's "
                f"pipeline engine, whose checkpoints megads reads"
            )
        self.tp = 1 + max(rank for _, rank in self._places)
        self.layers = {layer: self._keys(layer) for layer in sorted({n for n, _ in self._places})}
        self.notes: tuple[str, ...] = ()
        self._partitions: Partitions | None = None
        try:
            partitions = Partitions(folder, self.tp, opened, moments=optimizer)
            self._partitions = partitions if partitions.kinds else None
            if not optimizer:
                self._check_partitions()
        except CheckpointError as error:
            if optimizer:
                raise
            self._partitions = None
            self.notes = (
                f"the optimizer's files are left aside, weights are not masters: {error}",
            )
        self.masters = self._partitions is not None
        self.kinds: tuple[Kind, ...] = self._partitions.kinds if self._partitions else ("param",)
        self.updates = self._partitions.updates if self._partitions else None

    def size(self, layer: int, key: str, dim: int) -> int:
        return sum(self._weight(layer, key, rank).shape[dim] for rank in range(self.tp))

    def dtype(self, kind: Kind, layer: int, key: str) -> torch.dtype:
        if self._partitions:
            return self._partitions.dtype(kind, layer, key)
        return self._weight(layer, key, 0).dtype

    def shard(self, kind: Kind, layer: int, key: str, rank: int) -> Tensor:
        weight = self._weight(layer, key, rank)
        if self._partitions is None:
            return weight
        values = self._partitions.shard(kind, layer, key, rank, weight.shape)
        if kind == "param" and not torch.equal(values.to(weight.dtype), weight):
            self._check_masters(layer, key, rank, values)
        return values

    def _check_masters(self, layer: int, key: str, rank: int, values: Tensor) -> None:
        """Raises CheckpointError for a difference other than of what is not a number."""
        weight = self._weight(layer, key, rank)
        both = torch.stack([values.to(weight.dtype), weight]).float().nan_to_num()
        if not torch.equal(both[0], both[1]):
            masters = self.origins("param", layer, key, rank)[0]
            raise CheckpointError(
                f"{self._places[layer, rank].path}: {key} is not what {masters} is in "
                f"{weight.dtype}, they differ by {(both[0] - both[1]).abs().max().item():g}; the "
                f"optimizer's files are not of these weights: copy the right ones, or move all "
                f"*optim_states.pt away"
            )

    def _check_partitions(self) -> None:
        """Raises CheckpointError if a part of a weight is missing."""
        for layer, keys in self.layers.items():
            for key in sorted(keys):
                for rank in range(self.tp):
                    self.origins("param", layer, key, rank)

    def origins(self, kind: Kind, layer: int, key: str, rank: int) -> list[str]:
        names: list[str] = []
        shape = self._weight(layer, key, rank).shape
        if self._partitions:
            names += self._partitions.origins(kind, layer, key, rank, shape)
        if kind == "param":
            names.append(self._name(layer, key, rank))
        return names

    def stored(self) -> list[str]:
        names = [
            self._name(layer, key, rank)
            for layer, keys in self.layers.items()
            for key in sorted(keys)
            for rank in range(self.tp)
        ]
        return names + (self._partitions.stored() if self._partitions else [])

    def _name(self, layer: int, key: str, rank: int) -> str:
        place = self._places[layer, rank]
        return f"{place.path.name}:{place.prefix}{key}"

    def _keys(self, layer: int) -> frozenset[str]:
        """Names of a layer's tensors, which are the same on all ranks."""
        keys: list[frozenset[str]] = []
        for rank in range(self.tp):
            place = self._places.get((layer, rank))
            if place is None:
                raise CheckpointError(
                    f"{self._places[next(iter(self._places))].path.parent}: layer {layer:02d} of "
                    f"tensor-parallel rank {rank:02d} is missing, others have {self.tp} ranks"
                )
            tensors = _tensors(self._opened.table(place.path), place.prefix)
            keys.append(frozenset(key for key in tensors if not is_buffer(key)))
        if odd := next((rank for rank in range(self.tp) if keys[rank] != keys[0]), 0):
            first, other = (self._places[layer, rank].path for rank in (0, odd))
            raise CheckpointError(
                f"{first} and {other.name} hold different tensors: "
                f"{', '.join(sorted(keys[0] ^ keys[odd])[:5])} in one of them"
            )
        return keys[0]

    def _weight(self, layer: int, key: str, rank: int) -> Tensor:
        place = self._places[layer, rank]
        try:
            return _tensors(self._opened.table(place.path), place.prefix)[key]
        except KeyError:
            raise CheckpointError(f"{place.path} does not hold {place.prefix}{key}") from None


def layer_files(folder: Path) -> dict[tuple[int, int], _Place]:
    """The layer files of a folder, by layer and tensor-parallel rank.

    Raises CheckpointError for a mixture of experts.
    """
    places = {}
    for path in sorted(folder.glob("*.pt")):
        if _EXPERT.fullmatch(path.name):
            raise CheckpointError(f"{path} is of a mixture of experts, which megads does not have")
        if match := _LAYER.fullmatch(path.name):
            places[int(match[1]), int(match[2])] = _Place(path)
    return places


def _sequential(folder: Path, opened: Opened) -> dict[tuple[int, int], _Place]:
    """The same for a model that ran without the pipeline engine: all layers in a rank's file."""
    places = {}
    for rank, path in model_files(folder).items():
        module = opened.table(path).get("module")
        for key in module if isinstance(module, Mapping) else ():
            if match := _SEQUENTIAL.fullmatch(str(key)):
                layer = int(match[1])
                places[layer, rank] = _Place(path, f"sequential.{layer}.")
    return places


def _tensors(content: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """The tensors of a layer, by their names in it."""
    table = content["module"] if prefix else content
    return {
        key.removeprefix(prefix): value.detach()
        for key, value in table.items()
        if isinstance(value, Tensor) and key.startswith(prefix)
    }
