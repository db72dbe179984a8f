"""What one rank's file of Megatron-LM's `torch` format holds of the model, by core names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megads.convert.megatron.names import from_old, is_parameter, layer_of
from megads.convert.pickles import Inert, load_pickle
from megads.errors import CheckpointError


@dataclass(frozen=True)
class Held:
    """A tensor of a file; `label` says of which file, and what it is called there."""

    label: str
    tensor: Tensor


@dataclass(frozen=True)
class RankState:
    """A rank's file. `chunks`: the parameters of each virtual stage, in the order of the model.

    A parameter's name has the number of its layer within the chunk, as in the file.
    """

    path: Path
    label: str
    content: Mapping[str, Any]
    chunks: tuple[Mapping[str, Held], ...]
    before_core: bool

    @property
    def args(self) -> Mapping[str, Any]:
        """Arguments of the run; raises CheckpointError if there are none."""
        args = self.content.get("args")
        if not isinstance(args, Inert):
            raise CheckpointError(f"{self.path} holds no args, which say what model it is")
        return vars(args)

    @property
    def version(self) -> float:
        """`checkpoint_version`; a file before core that has none is of version 0."""
        return float(self.content.get("checkpoint_version", 0 if self.before_core else 3.0))


def read_rank(path: Path, root: Path) -> RankState:
    """Read a rank's file; its tensors are mapped. Raises CheckpointError."""
    content = load_pickle(path)
    label = str(path.relative_to(root))
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} should hold a dictionary, and holds {type(content).__name__}"
        )
    if "model" in content:
        names = ["model"]
    else:
        names = [f"model{i}" for i in range(len(content)) if f"model{i}" in content]
    if not names:
        raise CheckpointError(f"{path} holds no model")
    chunks, old = [], False
    for name in names:
        state = content[name]
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {name} is no dictionary")
        old = old or "language_model" in state
        flat = _before_core(state, name) if "language_model" in state else _core(state, name)
        chunks.append(
            {
                key: Held(f"{label}:{origin}", tensor)
                for key, origin, tensor in flat
                if is_parameter(key)
            }
        )
    return RankState(path, label, content, tuple(chunks), old)


_DEPTH = 6
"""Two are usual. A file that holds itself has no end."""
_Named = tuple[str, str, Tensor]
"""A tensor with its core name and the one it has in the file."""


def _core(state: Mapping[str, Any], prefix: str) -> Iterator[_Named]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield key, f"{prefix}.{key}", value


def _before_core(state: Mapping[str, Any], prefix: str) -> Iterator[_Named]:
    """Nested dictionaries; the copy of a tied embedding is beside `language_model`."""
    for part, inner in state.items():
        for key, value in _leaves(inner):
            origin = f"{prefix}.{part}.{key}"
            if part == "language_model":
                yield from_old(key), origin, value
            elif part == "word_embeddings_for_head":
                yield f"output_layer.{key}", origin, value
            else:
                yield f"{part}.{key}", origin, value


def _leaves(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dictionaries by their dotted path.

    Raises CheckpointError if there are more than `_DEPTH` inside one another.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            yield ".".join(path), value
        elif isinstance(value, dict):
            if len(path) == _DEPTH:
                raise CheckpointError(f"{'.'.join(path)}: too many dictionaries inside one another")
            waiting += [((*path, str(key)), inner) for key, inner in reversed(value.items())]


def layer_count(chunk: Mapping[str, Held], path: Path) -> int:
    """Layers of a virtual stage; raises CheckpointError if their numbers have gaps."""
    numbers = {number for name in chunk if (number := layer_of(name)) is not None}
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"{path}: layers are numbered {sorted(numbers)}, not from 0 on")
    return len(numbers)
