"""One conversion, from opening the source to the finished target."""

from __future__ import annotations

import os
import re
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
                _copy(extra, temporary / extra.name)
        _sync_all(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unfinished(target: Path) -> list[Path]:
    """What conversions into `target` that were killed have left, or such that still go on."""
    name = re.compile(re.escape(f".{target.name}-") + "[0-9a-f]{8}")
    if not target.parent.is_dir():
        return []
    return sorted(entry for entry in target.parent.iterdir() if name.fullmatch(entry.name))


def writable() -> Sequence[str]:
    """Formats that can be written."""
    return [name for name, format in FORMATS.items() if format.write is not None]


def _copy(source: Path, target: Path) -> None:
    """A file's bytes, on the disk on return."""
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())


def _sync_all(directory: Path) -> None:
    """Make the names in a directory and in all below it durable, the innermost first."""
    for path, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(path))


def check_equal(source: Source, result: Source, options: WriteOptions) -> int:
    """Hold what was written against the source, tensor by tensor, to the bit; how many there are.

    Weights are compared in the type they had to be written in. Raises CheckpointError naming the
    first setting of the model, kind, type or tensor that is not as it has to be.
    """
    written = FORMATS[result.format]
    _check_models(source, result, exact=written.exact)
    kinds = source.kinds if written.moments and options.optimizer else source.kinds[:1]
    if missing := [kind for kind in kinds if kind not in result.kinds]:
        raise CheckpointError(f"{result.path} lacks {', '.join(missing)}, which {source.path} has")
    count = 0
    for kind in kinds:
        for spec in param_specs(source.model):
            what = f"{result.path}: {kind} of {spec.name}"
            dtype = source.dtype(kind, spec.name)
            if kind == "param" and written.moments:
                dtype = options.dtype or dtype
            elif kind == "param":
                dtype = source.weights_dtype(spec.name, options)
            want, got = source.tensor(kind, spec.name), result.tensor(kind, spec.name)
            if got.dtype != dtype:
                raise CheckpointError(f"{what} is of {got.dtype} instead of {dtype}")
            if got.shape != want.shape or not _same_bits(want.to(dtype), got):
                raise CheckpointError(f"{what} is not the source's")
            count += 1
    return count


_UNSAID = frozenset({"name", "vocab_multiple", "init_std", "init_scale_output"}) | {
    "hidden_dropout",
    "attention_dropout",
}
"""Fields of ModelConfig that foreign formats may have no place for; none changes the outputs."""
_ROTATION = frozenset({"rope_theta", "rope_fraction", "rope_scaling"})


def _check_models(source: Source, result: Source, *, exact: bool) -> None:
    rotated = source.model.position == "rope"
    unsaid = frozenset() if exact else _UNSAID | (frozenset() if rotated else _ROTATION)
    want, got = (one.model.model_dump(exclude=set(unsaid)) for one in (source, result))
    if wrong := [field for field in want if got[field] != want[field]]:
        raise CheckpointError(
            f"{result.path} is another model than {source.path}: "
            + ", ".join(f"{field}={got[field]!r} instead of {want[field]!r}" for field in wrong)
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
