"""Megatron-LM's `torch_dist` format as a source: global tensors, most of them of all layers.

Moments are read where the files have them by parameter. The distributed optimizer's flat buckets,
whose layout the files do not tell, are left alone, with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.megatron.args import Setting, read_model
from megads.convert.megatron.chunks import GlobalTensor, read_box, read_contents
from megads.convert.megatron.files import check_backend
from megads.convert.megatron.join import join
from megads.convert.megatron.names import core_names, is_parameter, layer_of, stacked
from megads.convert.megatron.optimizer import updates_of
from megads.convert.megatron.words import words_of
from megads.convert.pickles import Inert, load_pickle
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

_MASTERS = "optimizer.state.fp32_param."
_STATES: Mapping[Kind, str] = {
    "param": "",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
_FLAT = "optimizer.distributed."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class _Part:
    tensor: GlobalTensor
    layer: int | None

    @property
    def label(self) -> str:
        return self.tensor.name if self.layer is None else f"{self.tensor.name}[{self.layer}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]


class TorchDist(Source):
    """The iteration in `folder`; raises CheckpointError if it is damaged or of an unknown kind."""

    format = "megatron-lm"

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self.path = folder
        check_backend(folder)
        contents = read_contents(folder)
        self._tensors = {
            name: tensor for name, tensor in contents.tensors.items() if is_parameter(name)
        }
        common = _common(folder, contents.objects)
        args = common.get("args")
        if not isinstance(args, Inert):
            raise CheckpointError(f"{folder} holds no args, which say what model it is")
        words = vocabulary(folder, options, words_of(folder, vars(args)), self._rows())
        self.notes = words.notes
        self._check_layers(vars(args).get("num_layers"))
        try:
            self.model = read_model(vars(args), Setting(words.size))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._specs = {spec.name: spec for spec in param_specs(self.model)}
        self._use_optimizer(options, precision_of(vars(args)))
        self.trained = Trained(
            int(common.get("iteration", 0)),
            int(vars(args).get("consumed_train_samples") or 0),
            int(vars(args).get("seq_length") or 0),
        )
        self._steps = updates_of(common.get("optimizer"))
        self.extras = extra_files(folder / "tokenizer")

    def _use_optimizer(self, options: ReadOptions, precision: torch.dtype | None) -> None:
        """Find out what there is of the optimizer's state; drop what is not wanted."""
        names = self._tensors
        self._has_masters = any(name.startswith(_MASTERS) for name in names)
        kinds = [k for k, prefix in _STATES.items() if any(n.startswith(prefix) for n in names)]
        self.kinds = tuple(kinds) if options.optimizer else ("param",)
        try:
            for prefix in (_MASTERS,) if self._has_masters else ():
                self._check_shapes(prefix)
            for kind in self.kinds[1:]:
                self._check_shapes(_STATES[kind])
        except CheckpointError as error:
            if options.optimizer:
                raise CheckpointError(
                    f"{error}; --drop-optimizer takes the weights alone"
                ) from None
            self._has_masters = False
            self.notes += (f"the weights are those the model computed with: {error}",)
        if not options.optimizer:
            mine = _MASTERS if self._has_masters else None
            self._tensors = {
                name: tensor
                for name, tensor in names.items()
                if not name.startswith(_OPTIMIZER) or (mine and name.startswith(mine))
            }
        elif len(kinds) == 1 and any(name.startswith(_FLAT) for name in names):
            self.notes += (
                f"the moments are left out: {self.path} has them in the distributed optimizer's "
                f"flat buckets ({_FLAT}*), which depend on a layout that the files do not tell",
            )
        if self._has_masters:
            self.notes += (MASTERS_NOTE,)
            self.precision = precision

    def _check_shapes(self, prefix: str) -> None:
        """Hold the optimizer's tensors against the weights: flattened ones have other shapes."""
        for name in self._specs:
            state, weight = self._find(prefix, name), self._find("", name)
            if state.shape != weight.shape:
                raise CheckpointError(
                    f"{self.path}: {state.label} has shape {state.shape}, and {weight.label} has "
                    f"{weight.shape}: it is flattened, which is not read"
                )

    def _rows(self) -> int:
        (name,) = core_names(WORD_EMBEDDING)
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks {name}")
        return self._tensors[name].shape[0]

    def _check_layers(self, expected: Any) -> None:
        """Hold the number of layers against the files, before anything is made of it."""
        name = core_names("blocks.0.attn.qkv.weight")[0]
        single = {layer_of(key) for key in self._tensors} - {None}
        whole = self._tensors.get(stacked(name))
        count = len(single) if whole is None else whole.shape[0]
        if expected != count:
            raise CheckpointError(
                f"{self.path}: num_layers={expected}, and the files hold {count} layers"
            )

    def training_state(self) -> dict[str, Any]:
        state = super().training_state()
        return state if self._steps is None else state | {"optimizer_updates": self._steps}

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        parts = [self._find(_STATES[kind], name)]
        if kind == "param" and self._has_masters:
            parts.append(self._find(_MASTERS, name))
        return tuple(part.label for part in parts)

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        return self._find(self._prefix(kind), name).tensor.dtype

    def tensor(self, kind: Kind, name: str) -> Tensor:
        part = self._find(self._prefix(kind), name)
        try:
            return join(
                [read_box(part.tensor, part.layer)], self._specs[name], self.model, "grouped"
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {part.label}: {error}") from None

    def stored(self) -> Iterator[str]:
        for name, tensor in self._tensors.items():
            if name.startswith(_FLAT):
                continue
            if any(f"{prefix}decoder.layers." in name for prefix in (".", "")) and (
                _number(name) is None
            ):
                yield from (_Part(tensor, layer).label for layer in range(tensor.shape[0]))
            else:
                yield name

    def _prefix(self, kind: Kind) -> str:
        return _MASTERS if kind == "param" and self._has_masters else _STATES[kind]

    def _find(self, prefix: str, name: str) -> _Part:
        for core in core_names(name):
            if prefix + core in self._tensors:
                return _Part(self._tensors[prefix + core], None)
            whole = self._tensors.get(prefix + stacked(core))
            layer = layer_of(core)
            if whole is not None and layer is not None and layer < whole.shape[0]:
                return _Part(whole, layer)
        raise CheckpointError(f"{self.path} lacks {prefix}{core_names(name)[0]} ({name})")


def _number(name: str) -> int | None:
    return layer_of(name[name.index("decoder.layers.") :])


def _common(folder: Path, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, iteration and groups of the optimizer; older versions have a file for them."""
    old = folder / "common.pt"
    if old.is_file():
        content = load_pickle(old)
    else:
        names = [name for name in objects if name.startswith("common_state/")]
        if not names:
            raise CheckpointError(f"{folder} has neither a common.pt nor a common state")
        chunk = objects[names[0]]
        content = load_pickle(chunk.file, chunk.span)
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: the common state is no dictionary")
    return content
