"""fp32 masters and Adam's moments in the files of DeepSpeed's ZeRO-1 and bf16 optimizers.

The parameters of a model-parallel rank lie one after another in a flat buffer for each group of
the optimizer, which is cut into equal partitions, the last with padding at its end, one for each
data-parallel rank. A file tells which part of which parameter is where in its partition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.deepspeed.files import TIED, Opened, model_files, split_name
from megads.convert.source import Kind
from megads.errors import CheckpointError

_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_SHARED = "word_embeddings.weight"
"""What stages train together; of all else that is tied, only the first stage's copy is used."""


@dataclass(frozen=True)
class _Span:
    """A part of a parameter: entries [start, start + numel) of a group's partition."""

    path: Path
    name: str
    group: int
    start: int
    numel: int


class Partitions:
    """The optimizer's state of all ranks, read for one parameter at a time.

    `kinds`: what there is; empty without files, or if they keep the state without names. Without
    `moments` only the masters are looked at.
    """

    def __init__(self, folder: Path, tp: int, opened: Opened, *, moments: bool) -> None:
        """Raises CheckpointError if a file is missing."""
        self._opened = opened
        self._spans: dict[tuple[int, str, int], dict[int, list[_Span]]] = {}
        """By layer, name and tensor rank, then by stage; in the order of the partitions."""
        self.kinds: tuple[Kind, ...] = ()
        self.updates: int | None = None
        files = _files(folder)
        if not files or not all(self._index(folder, tp, at, files[at]) for at in sorted(files)):
            self._spans = {}
            return
        found = _moments(self._state(files[min(files)]), 0) if moments else {}
        self.kinds = ("param",)
        if {"exp_avg", "exp_avg_sq"} <= found.keys():
            self.kinds = ("param", "exp_avg", "exp_avg_sq")
            self.updates = int(found["step"]) if "step" in found else None

    def dtype(self, kind: Kind, layer: int, key: str) -> torch.dtype:
        return self._flat(kind, self._parts(layer, key, 0)[0]).dtype

    def shard(self, kind: Kind, layer: int, key: str, rank: int, shape: Sequence[int]) -> Tensor:
        """A rank's part of a parameter; `shape` is that of its weight in the layer's file."""
        self._checked(layer, key, rank, shape)
        first, *others = self._stages(layer, key, rank)
        values = self._read(kind, first)
        for other in others if key == _SHARED else ():
            if not torch.equal(values, self._read(kind, other)):
                raise CheckpointError(
                    f"{first[0].path} and {other[0].path.name}: the two stages' copies of "
                    f"{first[0].name} ({kind}) differ; one of the files is not of this checkpoint"
                )
        return values.view(*shape)

    def origins(
        self, kind: Kind, layer: int, key: str, rank: int, shape: Sequence[int]
    ) -> list[str]:
        """File and name of each part. Raises CheckpointError if they do not make up `shape`."""
        self._checked(layer, key, rank, shape)
        stages = self._stages(layer, key, rank)[: None if key == _SHARED else 1]
        return [_label(kind, span) for spans in stages for span in spans]

    def stored(self) -> list[str]:
        """All names, without the copies that nothing uses."""
        names = []
        for (_, key, _), stages in self._spans.items():
            used = [stages[stage] for stage in sorted(stages)][: None if key == _SHARED else 1]
            names += [_label(kind, s) for kind in self.kinds for spans in used for s in spans]
        return names

    def _index(self, folder: Path, tp: int, at: tuple[int, int], path: Path) -> bool:
        """Note what is where in a file; False if it does not say."""
        data_rank, model_rank = at
        state = self._state(path)
        flat = state.get("single_partition_of_fp32_groups")
        if not isinstance(flat, Sequence):
            return False
        tables = state.get("param_slice_mappings")
        if tables is None:
            sizes = [group.numel() for group in flat]
            tables = self._tables(model_files(folder).get(model_rank), sizes, data_rank)
        if tables is None:
            return False
        try:
            spans = [
                _Span(path, name, group, int(address.start), int(address.numel))
                for group, table in enumerate(tables)
                for name, address in table.items()
                if address.numel
            ]
            sizes = [group.numel() for group in flat]
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        for span in spans:
            size = sizes[span.group] if span.group < len(sizes) else 0
            if not 0 <= span.start < span.start + span.numel <= size:
                raise CheckpointError(
                    f"{path} is damaged: {span.name} is said to be {span.numel} elements from "
                    f"{span.start} of a partition of {size}"
                )
            layer, key = split_name(span.name, path)
            stages = self._spans.setdefault((layer, key, model_rank % tp), {})
            stages.setdefault(model_rank // tp, []).append(span)
        return True

    def _tables(
        self, model_file: Path | None, sizes: list[int], data_rank: int
    ) -> list[dict[str, _Address]] | None:
        """Addresses as older files leave them to be computed from the shapes of the parameters."""
        shapes = self._opened.table(model_file).get("param_shapes") if model_file else None
        if not isinstance(shapes, Sequence) or len(shapes) != len(sizes):
            return None
        tables = []
        for group, size in zip(shapes, sizes, strict=True):
            table, position, low = {}, 0, size * data_rank
            for name, shape in group.items():
                start, stop = position, position + math.prod(shape)
                position = stop
                start, stop = max(start, low), min(stop, low + size)
                if start < stop:
                    table[name] = _Address(start - low, stop - start)
            tables.append(table)
        return tables

    def _state(self, path: Path) -> Mapping[str, Any]:
        state = self._opened.table(path).get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path} holds no optimizer_state_dict")
        return state

    def _stages(self, layer: int, key: str, rank: int) -> list[list[_Span]]:
        found = self._spans.get((layer, key, rank)) or self._spans.get((TIED, key, rank)) or {}
        return [found[stage] for stage in sorted(found)]

    def _parts(self, layer: int, key: str, rank: int) -> list[_Span]:
        stages = self._stages(layer, key, rank)
        if not stages:
            raise CheckpointError(
                f"the optimizer's files do not hold {layer}.{key} of tensor-parallel rank {rank}"
            )
        return stages[0]

    def _checked(self, layer: int, key: str, rank: int, shape: Sequence[int]) -> None:
        """All parts must be there, and nothing else: no padding."""
        spans = self._parts(layer, key, rank)
        found = sum(span.numel for span in spans)
        if found != math.prod(shape):
            raise CheckpointError(
                f"{', '.join(span.path.name for span in spans)}: {found} of the "
                f"{math.prod(shape)} elements of {spans[0].name} are there"
            )

    def _flat(self, kind: Kind, span: _Span) -> Tensor:
        state = self._state(span.path)
        if kind == "param":
            flat: Tensor = state["single_partition_of_fp32_groups"][span.group]
        else:
            flat = _moments(state, span.group)[kind]
        return flat.detach().view(-1)

    def _read(self, kind: Kind, spans: list[_Span]) -> Tensor:
        return torch.cat([self._flat(kind, s)[s.start : s.start + s.numel] for s in spans])


@dataclass(frozen=True)
class _Address:
    start: int
    numel: int


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """The optimizer's files by data-parallel and model-parallel rank; none may be missing."""
    files = {}
    for path in folder.glob("*optim_states.pt"):
        if match := _FILE.fullmatch(path.name):
            files[int(match[1]), int(match[2])] = path
    if not files:
        return {}
    models = model_files(folder) or {model: folder for _, model in files}
    data_ranks = 1 + max(data for data, _ in files)
    for data in range(data_ranks):
        for model in models:
            if (data, model) not in files:
                raise CheckpointError(
                    f"{folder}: the optimizer's file of data-parallel rank {data} and "
                    f"model-parallel rank {model:02d} is missing, there are {data_ranks} x "
                    f"{len(models)} ranks; copy it, or move all *optim_states.pt away"
                )
    return files


def _moments(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    """Adam's state of a group, as newer and older versions keep it."""
    base = state.get("base_optimizer_state", {})
    table = base.get("state", {}) if isinstance(base, Mapping) else base
    try:
        found: Mapping[str, Any] = table[group]
    except (KeyError, IndexError):
        return {}
    return found


def _label(kind: Kind, span: _Span) -> str:
    return f"{span.path.name}:{span.name}" + ("" if kind == "param" else f" ({kind})")
