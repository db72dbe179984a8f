"""What all formats meet in: a checkpoint, opened for reading, as canonical tensors.

Canonical is what `megads.models.families` says: names, unpadded shapes, `[q; k; v]` and
`[gate; up]` of the whole model. A reader makes one tensor at a time, from the files that hold it,
so that no model has to fit into memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.errors import CheckpointError
from megads.models.families import param_specs

Kind = Literal["param", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class ReadOptions:
    """What the files do not say.

    `step`: the iteration to take, None the one the checkpoint calls its latest. `qkv`: how the rows
    of fused projections are ordered where shapes do not tell ("auto": as the format's documentation
    says). `keep_padding`: take the padded rows of the vocabulary as words, for software that
    trained with them. `vocab_size`: how many words there are, for files that only know the padded
    number. `optimizer` False: the moments are not wanted, so state of the optimizer that cannot be
    read does not stand in the way of the weights.
    """

    step: int | None = None
    qkv: Literal["auto", "grouped", "thirds"] = "auto"
    keep_padding: bool = False
    vocab_size: int | None = None
    optimizer: bool = True


@dataclass(frozen=True)
class WriteOptions:
    """How the result is laid out.

    `dtype` of the weights; None as they are in the source. `optimizer`: with the moments, if the
    source and the format have them. `tp`, `pp`: of formats with files for each rank.
    `max_file_bytes`: where a format is free to choose.
    """

    dtype: torch.dtype | None = None
    optimizer: bool = True
    tp: int = 1
    pp: int = 1
    max_file_bytes: int = 5 << 30


EXTRA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""What Hugging Face puts beside weights; a converter that writes one of them itself does so."""

MASTERS_NOTE = (
    "the weights are the optimizer's fp32 masters; formats without its state get them rounded to "
    "the type the model computed in"
)
"""For the notes of a source whose `precision` is narrower than its weights."""

Report = Callable[[Kind, str], None]
"""Told of each canonical tensor that has been written."""


@dataclass(frozen=True)
class Trained:
    """How far the model has been trained: optimizer updates and samples.

    `seq_length`: the tokens of a sample; 0 if the files do not say.
    """

    step: int = 0
    samples: int = 0
    seq_length: int = 0


def precision_of(args: Mapping[str, Any]) -> torch.dtype | None:
    """What the arguments of Megatron say of the type it computes in; None: that of its weights."""
    if args.get("bf16"):
        return torch.bfloat16
    return torch.float16 if args.get("fp16") else None


class Source(ABC):
    """A checkpoint of one format.

    `kinds`: which of the weights ("param") and Adam's moments it holds, weights first; weights are
    fp32 masters where there are any. `extras`: files to carry along, such as a tokenizer's.
    `precision`: the type the model computes in, where the weights are masters of a wider one; that
    is the type of files that hold no optimizer's state, unless another one is asked for. `notes`:
    what was decided where the files leave a choice, for the user to read.
    """

    format: str
    path: Path
    model: ModelConfig
    kinds: tuple[Kind, ...] = ("param",)
    trained: Trained = Trained()
    extras: tuple[Path, ...] = ()
    precision: torch.dtype | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        """The names, in the files, of all that makes up a canonical tensor.

        Raises CheckpointError naming what is missing.
        """

    @abstractmethod
    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        """Type of a canonical tensor, without reading it."""

    def weights_dtype(self, name: str, options: WriteOptions) -> torch.dtype:
        """Type of a weight in a file that holds no optimizer's state."""
        return options.dtype or self.precision or self.dtype("param", name)

    @abstractmethod
    def tensor(self, kind: Kind, name: str) -> Tensor:
        """A canonical tensor, contiguous, on the CPU."""

    @abstractmethod
    def stored(self) -> Iterable[str]:
        """The names, in the files, of all tensors that hold something of the model.

        Buffers that are computed (masks, rotary frequencies) are left out.
        """

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint of megads says of the run, as far as this source knows."""
        trained = self.trained
        tokens = trained.samples * trained.seq_length
        train = {"step": trained.step, "samples": trained.samples, "tokens": tokens, "run_id": ""}
        return {"train": train, "optimizer_updates": trained.step}

    def check_complete(self) -> None:
        """Raise CheckpointError if a tensor is missing, or left over, by its name."""
        used: set[str] = set()
        for kind in self.kinds:
            for spec in param_specs(self.model):
                used.update(self.origins(kind, spec.name))
        left = sorted(set(self.stored()) - used)
        if left:
            some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if left[5:] else "")
            raise CheckpointError(f"{self.path} holds what this model has no place for: {some}")


def extra_files(directory: Path) -> tuple[Path, ...]:
    """Those of EXTRA_FILES that a directory has, to be carried along with the weights."""
    return tuple(directory / name for name in EXTRA_FILES if (directory / name).is_file())
