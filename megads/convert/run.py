"""One conversion, from opening the source to the finished target."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.checkpoint.directory import sync_directory
from megads.convert.formats import FORMATS, open_source
from megads.convert.source import Kind, ReadOptions, Report, Source, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs


@dataclass(frozen=True)
class Mapped:
    """A canonical tensor, what it was made of, and its size."""

    kind: Kind
    name: str
    origins: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def mapping(source: Source) -> list[Mapped]:
    """What becomes of what, in model order."""
    return [
        Mapped(kind, s.name, source.origins(kind, s.name), s.shape, source.dtype(kind, s.name))
        for kind in source.kinds
        for s in param_specs(source.model)
    ]


def open_checked(path: Path, name: str, options: ReadOptions) -> Source:
    """A source in which nothing is missing and nothing is left over."""
    source = open_source(path, name, options)
    source.check_complete()
    return source


def convert(source: Source, target: Path, to: str, options: WriteOptions, report: Report) -> None:
    """Write `source` as the format `to` into the directory `target`, which must not exist.

    It appears when all of it is on the disk. Raises CheckpointError; `target` is not there then.
    """
    write = FORMATS[to].write
    if write is None:
        raise CheckpointError(f"{to} is only read; choose {', '.join(writable())}")
    if target.exists():
        raise CheckpointError(f"{target} exists; choose a new directory")
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        write(source, temporary, options, report)
        for extra in source.extras:
            if not (temporary / extra.name).exists():
                shutil.copyfile(extra, temporary / extra.name)
        sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def writable() -> Sequence[str]:
    """Formats that can be written."""
    return [name for name, format in FORMATS.items() if format.write is not None]


def check_equal(source: Source, result: Source, options: WriteOptions) -> int:
    """Hold what was written against the source, tensor by tensor, to the bit; how many there are.

    Weights are compared in the type they were written in. Raises CheckpointError naming the first
    tensor that differs.
    """
    kinds = [kind for kind in source.kinds if kind in result.kinds]
    count = 0
    for kind in kinds:
        for spec in param_specs(source.model):
            want, got = source.tensor(kind, spec.name), result.tensor(kind, spec.name)
            if got.shape != want.shape or not _same_bits(want.to(got.dtype), got):
                raise CheckpointError(f"{result.path}: {kind} of {spec.name} is not the source's")
            count += 1
    return count


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
