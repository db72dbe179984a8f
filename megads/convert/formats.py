"""The formats there are, by name, and which of them a path holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megads.convert import megads_format
from megads.convert.deepspeed import reader as deepspeed
from megads.convert.hf import reader as hf
from megads.convert.hf import writer as hf_writer
from megads.convert.megatron import files as megatron_files
from megads.convert.megatron import reader as megatron
from megads.convert.megatron import writer as megatron_writer
from megads.convert.neox import reader as neox
from megads.convert.source import ReadOptions, Report, Source, WriteOptions
from megads.errors import CheckpointError


@dataclass(frozen=True)
class Format:
    """`holds`: whether a path is of this format. `write` None: it is only read.

    `write(source, target, options, report)` fills the empty directory `target`. `signs`: patterns
    of names of which a path has one even if its files are damaged or of an unknown kind. `heeds`:
    the ReadOptions that change something. `moments`: Adam's can be written. `free_files`: how large
    they are can be chosen. `exact`: what is written tells all of a ModelConfig.
    """

    holds: Callable[[Path], bool]
    open: Callable[[Path, ReadOptions], Source]
    write: Callable[[Source, Path, WriteOptions, Report], None] | None = None
    signs: tuple[str, ...] = ()
    heeds: frozenset[str] = frozenset()
    moments: bool = False
    free_files: bool = False
    exact: bool = False


_OPTIONS: Mapping[str, str] = {
    "step": "--step",
    "qkv": "--qkv",
    "keep_padding": "--keep-padding",
    "vocab_size": "--vocab-size",
}
_WORDS = frozenset({"step", "keep_padding", "vocab_size"})

FORMATS: Mapping[str, Format] = {
    "megads": Format(
        megads_format.holds,
        megads_format.open_source,
        megads_format.write,
        signs=("COMMIT", "manifest.json", "step-*", "checkpoints/step-*"),
        heeds=frozenset({"step"}),
        moments=True,
        free_files=True,
        exact=True,
    ),
    "megatron-lm": Format(
        megatron_files.holds,
        megatron.open_source,
        megatron_writer.write,
        signs=("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*/", "*.distcp"),
        heeds=_WORDS,
    ),
    "gpt-neox": Format(
        neox.holds,
        neox.open_source,
        signs=("configs/*.y*ml", "global_step*/configs/*.y*ml"),
        heeds=_WORDS | {"qkv"},
    ),
    "megatron-deepspeed": Format(
        deepspeed.holds,
        deepspeed.open_source,
        signs=("global_step*", "*_model_states.pt", "*_optim_states.pt", "zero"),
        heeds=_WORDS | {"qkv"},
    ),
    "hf": Format(
        hf.holds,
        hf.open_source,
        hf_writer.write,
        signs=("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"),
        free_files=True,
    ),
}


def open_source(path: Path, name: str = "auto", options: ReadOptions | None = None) -> Source:
    """Open a checkpoint; `name` "auto" finds out its format from the files.

    Raises CheckpointError if it is none, or could be of several, or for an option that the format
    has no use for.
    """
    options = options or ReadOptions()
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: it does not exist")
    found = [name] if name != "auto" else [n for n, f in FORMATS.items() if f.holds(path)]
    if not found:
        found = _resembled(path)
    if len(found) > 1:
        raise CheckpointError(f"{path} could be {' or '.join(found)}; choose one with --from")
    for field, word in _OPTIONS.items():
        given = getattr(options, field) != getattr(ReadOptions(), field)
        if given and field not in FORMATS[found[0]].heeds:
            raise CheckpointError(f"{path} is of {found[0]}, which ignores {word}; leave it out")
    return FORMATS[found[0]].open(path, options)


def _resembled(path: Path) -> list[str]:
    """The format whose files these seem to be: opening it tells what is wrong with them."""
    for name, known in FORMATS.items():
        if path.is_dir() and any(any(path.glob(sign)) for sign in known.signs):
            return [name]
    raise CheckpointError(f"{path} is no checkpoint of a known format: {', '.join(FORMATS)}")
