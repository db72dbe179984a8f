"""From the parts that tensor-parallel ranks hold to canonical tensors, and the source of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.deepspeed.files import Shards
from megads.convert.fused import from_grouped, in_sections
from megads.convert.source import MASTERS_NOTE, Kind, Source, Trained
from megads.errors import CheckpointError
from megads.models.families import param_specs

Join = Literal["copies", "sums", "columns", "rows", "grouped", "thirds", "gate_up", "up_gate"]
"""How the parts of the ranks make up a tensor.

The same on all ranks, or the mean should rounding have driven them apart; their sum (of the
weights: moments are copies); the entries of dim 0 or 1, of each rank in turn; of dim
0 with query, key and value heads per KV head ("grouped", see `fused`) or as `[q; k; v]` of each
rank ("thirds"); of dim 0 with a gate and an up half of each rank.
"""


_DRIFT = 0.05
"""Of copies, relative to the largest value: more has another cause than rounding."""


@dataclass(frozen=True)
class Slot:
    """Where the parts of a canonical tensor are; those of several `keys` follow one another."""

    layer: int
    keys: tuple[str, ...]
    join: Join


class DeepSpeedSource(Source):
    """A checkpoint whose canonical tensors are in `slots`."""

    def __init__(
        self,
        format: str,
        folder: Path,
        model: ModelConfig,
        shards: Shards,
        slots: Mapping[str, Slot],
    ) -> None:
        self.format, self.path, self.model = format, folder, model
        self.kinds = shards.kinds
        self._shards, self._slots = shards, slots
        self._shapes = {spec.name: spec.shape for spec in param_specs(model)}

    def describe(self, notes: tuple[str, ...], precision: torch.dtype | None) -> None:
        """Set `precision`, where the weights are masters, and `notes`, with what the files add.

        Raises CheckpointError if what should be copies are not.
        """
        self.notes = notes + self._shards.notes
        if self._shards.masters and precision is not None:
            self.precision = precision
            self.notes += (MASTERS_NOTE,)
        self.notes += self._drift_notes()

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        slot = self._slots[name]
        missing = [key for key in slot.keys if key not in self._shards.layers[slot.layer]]
        if missing:
            raise CheckpointError(
                f"{self.path}: layer {slot.layer} does not hold {missing[0]}, needed for {name}"
            )
        names = [
            origin
            for key in slot.keys
            for rank in range(self._shards.tp)
            for origin in self._shards.origins(kind, slot.layer, key, rank)
        ]
        return tuple(dict.fromkeys(names))

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        slot = self._slots[name]
        dtype: torch.dtype = self._shards.dtype(kind, slot.layer, slot.keys[0])
        return dtype

    def tensor(self, kind: Kind, name: str) -> Tensor:
        slot, shape = self._slots[name], self._shapes[name]
        joined = torch.cat([self._joined(kind, slot, key) for key in slot.keys])
        if name in ("embedding.word.weight", "head.weight"):
            joined = joined[: shape[0]]
        if joined.shape != shape:
            raise CheckpointError(
                f"{self.path}: {', '.join(slot.keys)} of layer {slot.layer} make up a tensor of "
                f"{list(joined.shape)}, but by the settings {name} is {list(shape)}"
            )
        return joined.contiguous()

    def stored(self) -> Iterable[str]:
        return self._shards.stored()

    def _drift_notes(self) -> tuple[str, ...]:
        """What there is to say of weights that all ranks hold but that are not the same on all.

        Raises CheckpointError if they are too far apart.
        """
        largest, where = 0.0, ""
        for name, slot in self._slots.items():
            (key, *others) = slot.keys
            if slot.join != "copies" or others or key not in self._shards.layers[slot.layer]:
                continue
            ranks = range(self._shards.tp)
            parts = [self._shards.shard("param", slot.layer, key, rank) for rank in ranks]
            drift = self._drift("param", slot, key, parts)
            if drift > largest:
                largest, where = drift, f"{name} ({key} of layer {slot.layer})"
        if not where:
            return ()
        return (
            f"copies on the {self._shards.tp} tensor-parallel ranks have drifted apart, their "
            f"means are taken; furthest those of {where}, by {largest:.2g} of its largest value",
        )

    def training_state(self) -> dict[str, Any]:
        state = super().training_state()
        if self._shards.updates is not None:
            state["optimizer_updates"] = self._shards.updates
        return state

    def _joined(self, kind: Kind, slot: Slot, key: str) -> Tensor:
        parts = [self._shards.shard(kind, slot.layer, key, rank) for rank in range(self._shards.tp)]
        join = slot.join
        if join == "copies" or (join == "sums" and kind != "param"):
            self._drift(kind, slot, key, parts)
            same = all(torch.equal(part, parts[0]) for part in parts)
            return parts[0] if same else torch.stack(parts).float().mean(0).to(parts[0].dtype)
        if join == "sums":
            return torch.stack(parts).float().sum(0).to(parts[0].dtype)
        if join in ("columns", "rows"):
            return torch.cat(parts, dim=int(join == "rows"))
        try:
            if join == "grouped":
                return from_grouped(torch.cat(parts), self.model)
            if join == "thirds":
                return in_sections(parts, self._thirds())
            gate_up = in_sections(parts, [self.model.ffn_hidden_size // self._shards.tp] * 2)
        except RuntimeError:
            raise CheckpointError(
                f"{self.path}: the {[len(part) for part in parts]} rows of {key} of layer "
                f"{slot.layer} on {self._shards.tp} tensor-parallel ranks cannot be split into "
                + ("query, key and value heads" if join in ("grouped", "thirds") else "halves")
            ) from None
        return gate_up if join == "gate_up" else torch.cat(gate_up.chunk(2)[::-1])

    def _thirds(self) -> list[int]:
        """Rows of q, k and v on a rank."""
        model, tp = self.model, self._shards.tp
        heads = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
        return [count * model.head_dim // tp for count in heads]

    def _drift(self, kind: Kind, slot: Slot, key: str, parts: Sequence[Tensor]) -> float:
        """The largest difference of what should be copies, relative to the largest value.

        Raises CheckpointError if it is more than rounding makes.
        """
        largest = 0.0
        for rank, part in enumerate(parts):
            if torch.equal(part, parts[0]):
                continue
            difference = (part.float() - parts[0].float()).abs().max().item()
            drift = difference / parts[0].float().abs().max().clamp_min(1e-30).item()
            if not drift <= _DRIFT:
                files = [self._shards.origins(kind, slot.layer, key, r)[0] for r in (0, rank)]
                raise CheckpointError(
                    f"{self.path}: {key} of layer {slot.layer} ({kind}) must be the same on all "
                    f"tensor-parallel ranks, but {files[0]} and {files[1]} differ by "
                    f"{difference:g}, {drift:.1%} of the largest value; with more than {_DRIFT:.0%}"
                    f" they are not of one checkpoint, copy the right files"
                )
            largest = max(largest, drift)
        return largest


@dataclass(frozen=True)
class Places:
    """The numbers of the layers. `head` None: tied."""

    embedding: int
    blocks: tuple[int, ...]
    norm: int
    head: int | None


@dataclass(frozen=True)
class Names:
    """What software calls things in a layer."""

    attention: str
    head: str
    norm: frozenset[str]


def find_places(folder: Path, shards: Shards, names: Names, num_layers: int) -> Places:
    """Which layer is what, by what it holds: the numbers differ with the version.

    Raises CheckpointError naming a layer that is missing, or not known.
    """
    kinds: dict[str, list[int]] = {"embedding": [], "blocks": [], "norm": [], "head": []}
    for layer, keys in shards.layers.items():
        if "word_embeddings.weight" in keys:
            kinds["embedding"].append(layer)
        elif f"{names.attention}.query_key_value.weight" in keys:
            kinds["blocks"].append(layer)
        elif names.head in keys:
            kinds["head"].append(layer)
        elif keys and keys <= names.norm:
            kinds["norm"].append(layer)
        elif keys:
            raise CheckpointError(
                f"{folder}: layer {layer} is none that megads knows; it holds "
                f"{', '.join(sorted(keys)[:5])}"
            )
    blocks = kinds["blocks"]
    if not blocks or blocks != list(range(blocks[0], blocks[0] + num_layers)):
        raise CheckpointError(
            f"{folder}: the model has {num_layers} blocks, there are those of layers {blocks}"
        )
    for kind, count in (("embedding", 1), ("norm", 1)):
        if len(kinds[kind]) != count:
            raise CheckpointError(
                f"{folder}: there must be one layer with the {kind}, found {kinds[kind]}"
            )
    head = kinds["head"]
    return Places(kinds["embedding"][0], tuple(blocks), kinds["norm"][0], head[0] if head else None)


def trained(states: Mapping[str, Any], samples: int | None, seq_length: Any) -> Trained:
    """How far, by a rank's model states; `seq_length` by the settings, None if they do not say."""
    step = states.get("iteration", states.get("global_steps", 0))
    samples = int(samples or states.get("global_samples", 0) or 0)
    return Trained(int(step), samples, int(seq_length or 0))
