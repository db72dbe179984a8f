"""Universal checkpoints of DeepSpeed: a folder with whole tensors for each parameter.

Two tools write them. Both put the tensor-parallel ranks' parts one after another; parts are
recovered here, so that what a rank holds (fused projections) is undone in one place for all
files. bigscience's keeps the padded vocabulary; DeepSpeed's cuts it, and joins fused halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.deepspeed.files import Opened, split_name
from megads.convert.source import Kind
from megads.errors import CheckpointError

_FILES: Mapping[Kind, str] = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint."""
    return (folder / "zero").is_dir() and any(folder.glob("mp_rank_*_model_states.pt"))


class UniversalShards:
    """The parameters under `folder`/zero, as `tp` ranks held them."""

    masters = True
    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path, tp: int, opened: Opened, *, optimizer: bool) -> None:
        """Without `optimizer` only the weights are looked at.

        Raises CheckpointError for a folder there that is no parameter's.
        """
        self.tp = tp
        self._opened = opened
        self._folders: dict[tuple[int, str], Path] = {}
        for path in sorted((folder / "zero").iterdir()):
            if path.is_dir():
                self._folders[split_name(path.name, path)] = path
        layers: dict[int, set[str]] = {}
        for layer, key in self._folders:
            layers.setdefault(layer, set()).add(key)
        self.layers = {layer: frozenset(layers[layer]) for layer in sorted(layers)}
        self.kinds: tuple[Kind, ...] = tuple(
            kind
            for kind, name in _FILES.items()
            if (optimizer or kind == "param")
            and any((path / f"{name}.pt").exists() for path in self._folders.values())
        )
        self.updates = self._step() if optimizer else None

    def size(self, layer: int, key: str, dim: int) -> int:
        return self._entry("param", layer, key)["param"].shape[dim]

    def dtype(self, kind: Kind, layer: int, key: str) -> torch.dtype:
        return self._entry(kind, layer, key)["param"].dtype

    def shard(self, kind: Kind, layer: int, key: str, rank: int) -> Tensor:
        entry = self._entry(kind, layer, key)
        whole: Tensor = entry["param"].detach()
        if "cat_dim" not in entry:
            return whole
        dim = int(entry["cat_dim"])
        halves = whole.chunk(int(entry.get("param_n_sub_params", 1)), dim)
        return torch.cat([half.tensor_split(self.tp, dim)[rank] for half in halves], dim)

    def origins(self, kind: Kind, layer: int, key: str, rank: int) -> list[str]:
        self._entry(kind, layer, key)
        return [self._name(kind, layer, key)]

    def stored(self) -> list[str]:
        return [
            self._name(kind, layer, key)
            for (layer, key), path in self._folders.items()
            for kind in self.kinds
            if (path / f"{_FILES[kind]}.pt").exists()
        ]

    def _name(self, kind: Kind, layer: int, key: str) -> str:
        return f"{self._folders[layer, key].name}/{_FILES[kind]}.pt"

    def _entry(self, kind: Kind, layer: int, key: str) -> Mapping[str, Any]:
        path = self._folders[layer, key] / f"{_FILES[kind]}.pt"
        entry = self._opened(path)
        if not isinstance(entry, Mapping):  # as the first versions wrote it
            entry = {"param": entry}
        if not isinstance(entry.get("param"), Tensor):
            raise CheckpointError(f"{path} does not hold a tensor called param")
        return entry

    def _step(self) -> int | None:
        for path in self._folders.values():
            if (path / "step.pt").exists():
                step = self._opened(path / "step.pt")
                return int(step["param"] if isinstance(step, Mapping) else step)
        return None
