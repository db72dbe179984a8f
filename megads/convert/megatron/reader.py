"""Megatron-LM's checkpoints as a source: which format it is, and the `torch` format at any layout.

Weights are the fp32 masters where the optimizer's state has them; they are held against the
model's own as they are read. Moments are read of Adam, from the optimizer's state or the
distributed optimizer's `distrib_optim.pt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.megatron.args import Setting, read_model
from megads.convert.megatron.dist import TorchDist
from megads.convert.megatron.files import (
    Ranks,
    is_torch_dist,
    iteration_folder,
    rank_files,
)
from megads.convert.megatron.join import join, qkv_order
from megads.convert.megatron.names import core_names, layer_of, with_layer
from megads.convert.megatron.optimizer import (
    MOMENTS,
    OptimizerState,
    Place,
    read_optimizer,
    updates_of,
)
from megads.convert.megatron.state import Held, RankState, layer_count, read_rank
from megads.convert.megatron.words import words_of
from megads.convert.source import (
    MASTERS_NOTE,
    Kind,
    ReadOptions,
    Source,
    Trained,
    extra_files,
    precision_of,
)
from megads.convert.vocabulary import vocabulary
from megads.errors import CheckpointError
from megads.models.families import WORD_EMBEDDING, param_specs

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_Parts = Mapping[str, Sequence[Held]]
"""By core name with the layer's number in the model: the parts of all tensor ranks, in order."""


def open_source(path: Path, options: ReadOptions) -> Source:
    """The iteration `options.step`, or the one that the tracker file names.

    Raises CheckpointError if files are missing or damaged, or the model is of an unknown kind.
    """
    folder = iteration_folder(path, options)
    return TorchDist(folder, options) if is_torch_dist(folder) else _Torch(folder, options)


class _Torch(Source):
    format = "megatron-lm"

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self.path = folder
        files = rank_files(folder)
        states = [[read_rank(file, folder.parent) for file in stage] for stage in files.files]
        first = states[0][0]
        self._order = qkv_order(first.version)
        self._offsets = _layer_offsets(states)
        self._parts: dict[Kind, _Parts] = {"param": self._merge(states, _weights(states))}
        rows = _rows(self._parts["param"], first)
        words = vocabulary(folder, options, words_of(folder, first.args), rows)
        _check_layers(first, sum(layer_count(c, first.path) for s in states for c in s[0].chunks))
        self.notes = words.notes
        self.model = _model(first, files, Setting(words.size, first.before_core))
        self._specs = {spec.name: spec for spec in param_specs(self.model)}
        self._weights = self._parts["param"]
        self._steps = updates_of(first.content.get("optimizer"))
        try:
            self._use_optimizer(states, options)
        except CheckpointError as error:
            if options.optimizer:
                raise CheckpointError(
                    f"{error}; --drop-optimizer takes the weights alone"
                ) from None
            self._parts = {"param": self._weights}
            self.notes += (f"the weights are those the model computed with: {error}",)
        if self._parts["param"] is not self._weights:
            self.notes += (MASTERS_NOTE,)
            self.precision = precision_of(first.args)
        self.kinds = tuple(self._parts)
        self.trained = _trained(first)
        self.extras = extra_files(folder / "tokenizer")

    def _use_optimizer(self, states: Sequence[Sequence[RankState]], options: ReadOptions) -> None:
        """Take masters for weights, and the moments if they are wanted.

        If they are not, nobody may be asked to do without: masters that are not the model's are
        found here, and not while the weights are read.
        """
        read = [[read_optimizer(rank) for rank in stage] for stage in states]
        kinds: tuple[Kind, ...] = ("param", *MOMENTS) if options.optimizer else ("param",)
        for kind in kinds:
            held = [[state.held.get(kind) for state in stage] for stage in read]
            if all(part is not None for stage in held for part in stage):
                self._parts[kind] = self._merge(states, held)  # type: ignore[arg-type]
        if options.optimizer:
            self.notes += _left_out(read)
        elif self._parts["param"] is not self._weights:
            for name in self._specs:
                self._checked_masters(name)

    def _merge(
        self, states: Sequence[Sequence[RankState]], held: Sequence[Sequence[Mapping[Place, Held]]]
    ) -> _Parts:
        """Parts of all ranks by their name in the whole model."""
        merged: dict[str, list[Held]] = {}
        for stage, ranks in enumerate(held):
            for rank, parameters in enumerate(ranks):
                for (chunk, name), part in parameters.items():
                    layer = layer_of(name)
                    if layer is not None:
                        name = with_layer(name, self._offsets[chunk][stage] + layer)
                    found = merged.setdefault(name, [])
                    if len(found) != rank:
                        raise CheckpointError(
                            f"{states[stage][0].path} and {states[stage][rank].path} do not hold "
                            f"parts of the same tensors: {name}"
                        )
                    found.append(part)
        for name, parts in merged.items():
            if len(parts) != len(states[0]):
                raise CheckpointError(
                    f"{self.path}: {name} is in the files of {len(parts)} tensor-parallel ranks, "
                    f"{parts[-1].label} the last, and there are {len(states[0])}"
                )
        return merged

    def training_state(self) -> dict[str, Any]:
        state = super().training_state()
        return state if self._steps is None else state | {"optimizer_updates": self._steps}

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        held = [self._parts[kind]]
        if kind == "param":
            held.append(self._weights)
        found: list[Held] = []
        for parts in held:
            found += self._find(parts, kind, name)
            if name == WORD_EMBEDDING and self.model.tie_embeddings:
                found += parts.get(_OUTPUT, ())
        return tuple(dict.fromkeys(part.label for part in found))

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        return self._find(self._parts[kind], kind, name)[0].tensor.dtype

    def tensor(self, kind: Kind, name: str) -> Tensor:
        parts = self._find(self._parts[kind], kind, name)
        if kind == "param" and self._parts["param"] is not self._weights:
            self._checked_masters(name)
        if name == WORD_EMBEDDING and self.model.tie_embeddings:
            _check_copies(parts, self._parts[kind].get(_OUTPUT, ()))
        try:
            tensors = [part.tensor for part in parts]
            return join(tensors, self._specs[name], self.model, self._order)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {parts[0].label}: {error}") from None

    def _checked_masters(self, name: str) -> None:
        masters = self._find(self._parts["param"], "param", name)
        _check_masters(masters, self._find(self._weights, "param", name))

    def stored(self) -> Iterator[str]:
        for parts in (self._weights, *self._parts.values()):
            for ranks in parts.values():
                yield from (part.label for part in ranks)

    def _find(self, parts: _Parts, kind: Kind, name: str) -> Sequence[Held]:
        for core in core_names(name):
            if core in parts:
                return parts[core]
        raise CheckpointError(f"{self.path} lacks {kind} of {core_names(name)[0]} ({name})")


def _weights(states: Sequence[Sequence[RankState]]) -> list[list[dict[Place, Held]]]:
    return [
        [
            {
                (number, name): held
                for number, c in enumerate(rank.chunks)
                for name, held in c.items()
            }
            for rank in stage
        ]
        for stage in states
    ]


def _layer_offsets(states: Sequence[Sequence[RankState]]) -> list[list[int]]:
    """The number of the first layer of each virtual stage, `[chunk][stage]`.

    The model goes through the first chunks of all stages, then the second ones.
    """
    offsets: list[list[int]] = []
    total = 0
    for chunk in range(len(states[0][0].chunks)):
        offsets.append([])
        for ranks in states:
            if len(ranks[0].chunks) != len(states[0][0].chunks):
                raise CheckpointError(
                    f"{ranks[0].path} has {len(ranks[0].chunks)} virtual stages, "
                    f"{states[0][0].path} has {len(states[0][0].chunks)}"
                )
            offsets[-1].append(total)
            total += layer_count(ranks[0].chunks[chunk], ranks[0].path)
    return offsets


def _check_layers(first: RankState, count: int) -> None:
    expected = first.args.get("num_layers")
    if count != expected:
        raise CheckpointError(
            f"{first.path}: num_layers={expected}, and the files hold {count} layers"
        )


def _rows(parts: _Parts, first: RankState) -> int:
    if _EMBEDDING not in parts:
        raise CheckpointError(f"{first.path} lacks {_EMBEDDING}")
    return sum(part.tensor.shape[0] for part in parts[_EMBEDDING])


def _model(first: RankState, files: Ranks, setting: Setting) -> ModelConfig:
    for name, size in (("tensor", files.tp), ("pipeline", files.pp)):
        stored = first.args.get(f"{name}_model_parallel_size", size)
        if stored != size:
            raise CheckpointError(
                f"{first.path}: {name}_model_parallel_size={stored}, and there are files for {size}"
            )
    try:
        return read_model(first.args, setting)
    except CheckpointError as error:
        raise CheckpointError(f"{first.path}: {error}") from None


def _left_out(optimizers: Sequence[Sequence[OptimizerState]]) -> tuple[str, ...]:
    reasons = [state.left_out for stage in optimizers for state in stage if state.left_out]
    return (f"the moments are left out: {reasons[0]}",) if reasons else ()


def _trained(first: RankState) -> Trained:
    step = int(first.content.get("iteration", 0))
    samples = first.args.get("consumed_train_samples")
    if samples is None:
        samples = step * (first.args.get("global_batch_size") or 0)
    return Trained(step, int(samples), int(first.args.get("seq_length") or 0))


def _check_masters(masters: Sequence[Held], weights: Sequence[Held]) -> None:
    """The model's weights are the masters, rounded: else the two do not belong together."""
    for master, weight in zip(masters, weights, strict=True):
        if not torch.equal(master.tensor.to(weight.tensor.dtype), weight.tensor):
            raise CheckpointError(
                f"{master.label} should be the master weights of {weight.label}, and rounds to "
                "other values"
            )


def _check_copies(parts: Sequence[Held], copies: Sequence[Held]) -> None:
    for part, copy in zip(parts, copies, strict=False):
        if not torch.equal(part.tensor, copy.tensor):
            raise CheckpointError(f"{copy.label} should be a copy of {part.label}, and differs")
