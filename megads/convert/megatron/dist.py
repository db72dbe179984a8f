"""Megatron-LM's `torch_dist` format as a source: global tensors, most of them of all layers.

Moments are read where the files have them by parameter; the distributed optimizer's flat buckets,
whose layout the files do not tell, are left alone.
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
from megads.convert.megatron.words import MASTERS_NOTE, words_of
from megads.convert.pickles import Inert, load_pickle
from megads.convert.source import Kind, ReadOptions, Source, Trained, extra_files, precision_of
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


@dataclass(frozen=True)
class _Part:
    tensor: GlobalTensor
    layer: int | None

    @property
    def label(self) -> str:
        return self.tensor.name if self.layer is None else f"{self.tensor.name}[{self.layer}]"


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
        self.model = read_model(vars(args), Setting(words.size))
        self.kinds = tuple(
            kind
            for kind, prefix in _STATES.items()
            if any(n.startswith(prefix) for n in self._tensors)
        )
        self._has_masters = any(name.startswith(_MASTERS) for name in self._tensors)
        if self._has_masters:
            self.notes += (MASTERS_NOTE,)
            self.precision = precision_of(vars(args))
        step = int(common.get("iteration", 0))
        self.trained = Trained(step, int(vars(args).get("consumed_train_samples") or 0))
        self._steps = _steps(common.get("optimizer"))
        self.extras = extra_files(folder / "tokenizer")
        self._specs = {spec.name: spec for spec in param_specs(self.model)}

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


def _steps(optimizer: Any) -> int | None:
    """Updates the optimizer has made."""
    if not isinstance(optimizer, dict):
        return None
    inner = optimizer.get("optimizer", optimizer)
    step = inner.get("state", {}).get("common_step")
    for group in inner.get("param_groups", []):
        step = group.get("step") if step is None else step
    return None if step is None else int(step)
