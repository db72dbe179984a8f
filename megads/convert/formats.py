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

    `write(source, target, options, report)` fills the empty directory `target`.
    """

    holds: Callable[[Path], bool]
    open: Callable[[Path, ReadOptions], Source]
    write: Callable[[Source, Path, WriteOptions, Report], None] | None = None


FORMATS: Mapping[str, Format] = {
    "megads": Format(megads_format.holds, megads_format.open_source, megads_format.write),
    "megatron-lm": Format(megatron_files.holds, megatron.open_source, megatron_writer.write),
    "megatron-deepspeed": Format(deepspeed.holds, deepspeed.open_source),
    "gpt-neox": Format(neox.holds, neox.open_source),
    "hf": Format(hf.holds, hf.open_source, hf_writer.write),
}


def open_source(path: Path, name: str = "auto", options: ReadOptions | None = None) -> Source:
    """Open a checkpoint; `name` "auto" finds out its format from the files.

    Raises CheckpointError if it is none, or could be of several.
    """
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: it does not exist")
    found = [name] if name != "auto" else [n for n, f in FORMATS.items() if f.holds(path)]
    if not found:
        raise CheckpointError(f"{path} is no checkpoint of a known format: {', '.join(FORMATS)}")
    if len(found) > 1:
        raise CheckpointError(f"{path} could be {' or '.join(found)}; choose one with --from")
    return FORMATS[found[0]].open(path, options or ReadOptions())
