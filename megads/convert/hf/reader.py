"""Hugging Face checkpoints as a source.

Read are the files that `save_pretrained` of transformers 4 and 5 writes and that the hub has. Of
OPT's table of positions the first two rows are left out, as no token is at them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megads.convert.hf.config import read_config
from megads.convert.hf.files import Entry, has_weights, list_tensors, read_json, read_tensor
from megads.convert.hf.layout import assemble
from megads.convert.hf.names import Stored
from megads.convert.source import Kind, ReadOptions, Source, extra_files
from megads.errors import CheckpointError
from megads.models.families import HEAD, WORD_EMBEDDING, param_specs
from megads.parallel.sharding import ParamSpec

CONFIG = "config.json"


def holds(path: Path) -> bool:
    """Whether there is a config.json that names a kind of model, with weights beside it."""
    try:
        settings = read_json(path / CONFIG)
    except CheckpointError:
        return False
    return bool({"model_type", "architectures"} & settings.keys()) and has_weights(path)


def open_source(path: Path, options: ReadOptions) -> Source:
    """The model in a directory; there are no steps to choose from, and orders are known.

    Raises CheckpointError naming what is missing, damaged or not supported.
    """
    return _HuggingFace(path)


class _HuggingFace(Source):
    format = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        settings = read_json(path / CONFIG)
        try:
            self._known, self.model = read_config(settings)
        except (CheckpointError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path / CONFIG}: {error}") from None
        self.extras = extra_files(path)
        self._names, self._entries = self._full_names(list_tensors(path))
        if self.model.num_layers > len(self._entries):
            raise CheckpointError(
                f"{path} cannot hold {self.model.num_layers} layers, as {CONFIG} says: there are "
                f"{len(self._entries)} tensors"
            )
        for spec in param_specs(self.model):
            self._check(spec)

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        return tuple(self._names[full] for full in self._holders(kind, name))

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        found = [self._float(full) for full in self._holders(kind, name)]
        return functools.reduce(torch.promote_types, found)

    def tensor(self, kind: Kind, name: str) -> Tensor:
        self._holders(kind, name)
        stored = self._stored(name)
        parts = [self._read(full) for full in stored.names]
        if name == WORD_EMBEDDING and self._head_copy is not None:
            self._check_tied(parts[0])
        return assemble(parts, stored, self.model)

    def stored(self) -> Iterator[str]:
        for full, name in self._names.items():
            if not self._known.names.is_buffer(full):
                yield name

    @property
    def _head_copy(self) -> str | None:
        """Full name of a head that is stored although it is the embedding."""
        (name,) = self._stored(HEAD).names
        return name if self.model.tie_embeddings and name in self._entries else None

    def _stored(self, name: str) -> Stored:
        return self._known.names.stored(name)

    def _holders(self, kind: Kind, name: str) -> tuple[str, ...]:
        """Full names of all that must be there for a canonical tensor."""
        if kind != "param":
            raise CheckpointError(f"{self.path} holds no {kind}")
        names = self._stored(name).names
        for full in names:
            if full not in self._entries:
                raise CheckpointError(f"{self.path} lacks {full}, for {name}")
        return (*names, self._head_copy) if name == WORD_EMBEDDING and self._head_copy else names

    def _full_names(self, raw: dict[str, Entry]) -> tuple[dict[str, str], dict[str, Entry]]:
        """Names as in the files, and entries, by full name."""
        names: dict[str, str] = {}
        for name in raw:
            full = self._known.names.full_name(name)
            if full in names:
                raise CheckpointError(f"{self.path} holds {full} twice: {names[full]} and {name}")
            names[full] = name
        return names, {full: raw[name] for full, name in names.items()}

    def _check(self, spec: ParamSpec) -> None:
        """Shapes and types against what config.json says."""
        self.dtype("param", spec.name)
        stored = self._stored(spec.name)
        for full, want in zip(stored.names, stored.shapes(spec), strict=True):
            entry = self._entries[full]
            if entry.shape != want:
                raise CheckpointError(
                    f"{entry.file}: {self._names[full]} has shape {list(entry.shape)}, but "
                    f"{CONFIG} asks for {list(want)}"
                )

    def _float(self, full: str) -> torch.dtype:
        entry = self._entries[full]
        if entry.dtype is None:
            raise CheckpointError(
                f"{entry.file}: {self._names[full]} is of type {entry.type_name}; only weights of "
                "16, 32 or 64 bit floating point can be converted"
            )
        return entry.dtype

    def _read(self, full: str) -> Tensor:
        return read_tensor(self._entries[full], self._names[full])

    def _check_tied(self, embedding: Tensor) -> None:
        assert self._head_copy is not None
        head = self._read(self._head_copy)
        if embedding.dtype != head.dtype or not torch.equal(embedding, head):
            raise CheckpointError(
                f"{self.path}: {self._names[self._head_copy]} is not the embedding, to which "
                f"{CONFIG} ties it; set tie_word_embeddings to false there to keep both"
            )
