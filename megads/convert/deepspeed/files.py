"""Where a checkpoint of DeepSpeed is, and the pickles and names in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megads.convert.pickles import load_pickle
from megads.convert.source import Kind
from megads.errors import CheckpointError

TIED = -1
"""Stands for the number of a layer whose weights several stages hold, each under the same name."""
_STEP = re.compile(r"global_step(\d+)")
_NAME = re.compile(r"(?:sequential\.)?(\d+)\.(.+)")
_TIED_NAME = re.compile(r"tied_modules\.\w+\.(.+)")
_BUFFERS = {"inv_freq", "masked_bias", "rotary_pos_emb", "_extra_state"}


class Opened:
    """Reads pickles, and keeps those last used: their tensors are mapped and take no memory.

    `limit`: how many, each of which holds one of the maps that a process may have; all files of
    the largest models are fewer.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._kept: dict[Path, Any] = {}

    def __call__(self, path: Path) -> Any:
        """What is in `path`; raises CheckpointError."""
        content = self._kept.pop(path) if path in self._kept else load_pickle(path)
        self._kept[path] = content
        if len(self._kept) > self._limit:
            self._kept.pop(next(iter(self._kept)))
        return content

    def table(self, path: Path) -> Mapping[str, Any]:
        """The same for a file that must hold a table by names."""
        content = self(path)
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not a table of names")
        return content


class Shards(Protocol):
    """The tensors of a checkpoint as its tensor-parallel ranks hold them.

    `layers`: for each layer of the pipeline, by its number, the names of what it holds. `kinds` as
    in `Source`. `masters`: the weights are the optimizer's. `updates`: how many Adam has made, None
    if the files do not say. `notes` as in `Source`.
    """

    tp: int
    layers: dict[int, frozenset[str]]
    kinds: tuple[Kind, ...]
    masters: bool
    updates: int | None
    notes: tuple[str, ...]

    def size(self, layer: int, key: str, dim: int) -> int:
        """Entries along `dim` of the shards of all ranks together."""
        ...

    def dtype(self, kind: Kind, layer: int, key: str) -> Any:
        """Type of all ranks' shards."""
        ...

    def shard(self, kind: Kind, layer: int, key: str, rank: int) -> Tensor:
        """What tensor-parallel rank `rank` holds. Raises CheckpointError."""
        ...

    def origins(self, kind: Kind, layer: int, key: str, rank: int) -> list[str]:
        """File and name of all that is read for a shard. Raises CheckpointError if not there."""
        ...

    def stored(self) -> list[str]:
        """All names that `origins` could give."""
        ...


def find_folder(
    path: Path, step: int | None, holds: Callable[[Path], bool], *, pointer: str, suffix: str = ""
) -> Path:
    """The folder with the files of one iteration, which is `path` itself or below it.

    Without `step` it is the one that the file `pointer` names, else that of the highest number.
    Raises CheckpointError if it is not there.
    """
    if holds(path) and (step is None or path.name == f"global_step{step}{suffix}"):
        return path
    root = path.parent if holds(path) else path
    there = {int(match[1]): folder for folder, match in _steps(root, suffix) if holds(folder)}
    known = ", ".join(map(str, sorted(there))) or "none"
    if step is not None:
        if step not in there:
            raise CheckpointError(f"{root} has no checkpoint of step {step}; it has: {known}")
        return there[step]
    if (root / pointer).is_file():
        name = (root / pointer).read_text(encoding="utf-8", errors="replace").strip()
        if Path(name).name != name or not holds(root / name):
            raise CheckpointError(
                f"{root / pointer} names {name!r}, where there is no checkpoint; choose another "
                f"with --step, there are: {known}"
            )
        return root / name
    if not there:
        raise CheckpointError(f"{root} holds no checkpoint of DeepSpeed's pipeline engine")
    return there[max(there)]


def _steps(root: Path, suffix: str) -> list[tuple[Path, re.Match[str]]]:
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(folder.name.removesuffix(suffix))
        if match and folder.name.endswith(suffix) and folder.is_dir():
            found.append((folder, match))
    return found


def model_files(folder: Path) -> dict[int, Path]:
    """The files with a rank's settings, by rank over stages and tensor ranks (those inner)."""
    pattern = re.compile(r"mp_rank_(\d+)_model_states\.pt")
    return _numbered(folder, pattern)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    matches = ((pattern.fullmatch(path.name), path) for path in sorted(folder.glob("*.pt")))
    return {int(match[1]): path for match, path in matches if match}


def split_name(name: str, path: Path) -> tuple[int, str]:
    """Number of the layer and name in it of a parameter of the whole model.

    Raises CheckpointError naming it and `path`, which holds it.
    """
    if match := _TIED_NAME.fullmatch(name):
        return TIED, match[1]
    if match := _NAME.fullmatch(name):
        return int(match[1]), match[2]
    raise CheckpointError(f"{path}: {name} is not in a layer of a pipeline, megads cannot place it")


def is_buffer(key: str) -> bool:
    """Whether this is computed from the settings and not learned."""
    return key.rpartition(".")[2] in _BUFFERS
