"""megads' own checkpoints as a source, and as a target: cut and typed anew."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.checkpoint.directory import commit, find_checkpoint, read_manifest
from megads.checkpoint.manifest import Manifest
from megads.checkpoint.reader import check_layers, fill_pieces
from megads.checkpoint.reshard import assign_writers
from megads.checkpoint.writer import SaveMeta, SavePlan, make_manifest, piece_info, write_share
from megads.convert.narrow import retype
from megads.convert.source import (
    Kind,
    ReadOptions,
    Report,
    Source,
    Trained,
    WriteOptions,
    extra_files,
)
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.parallel.pieces import Stored, TensorPiece

KINDS: tuple[Kind, ...] = ("param", "exp_avg", "exp_avg_sq")


def holds(path: Path) -> bool:
    """Whether there is a checkpoint of megads, or a run with one."""
    with contextlib.suppress(CheckpointError):
        find_checkpoint(path)
        return True
    return False


def open_source(path: Path, options: ReadOptions) -> Source:
    """The checkpoint of step `options.step`, or the newest."""
    return _Megads(path, options)


class _Megads(Source):
    format = "megads"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        found = find_checkpoint(path)
        if options.step is not None and found.name != f"step-{options.step}":
            found = find_checkpoint(found.with_name(f"step-{options.step}"))
        self.path = found
        self.extras = extra_files(found.parent)
        self.manifest: Manifest = read_manifest(found)
        check_layers(found, self.manifest)
        self.model = self.manifest.model
        self.kinds = tuple(
            kind for kind in KINDS if any(k.startswith(f"{kind}/") for k in self.manifest.tensors)
        )
        self.trained = _trained(found, self.manifest)

    def training_state(self) -> dict[str, Any]:
        return dict(self.manifest.state)

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        key = f"{kind}/{name}"
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.path} does not hold {key}")
        return (key,)

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        self.origins(kind, name)
        dtype: torch.dtype = getattr(torch, self.manifest.tensors[f"{kind}/{name}"].dtype)
        return dtype

    def tensor(self, kind: Kind, name: str) -> Tensor:
        (key,) = self.origins(kind, name)
        shape = self.manifest.tensors[key].shape
        data = torch.empty(shape, dtype=self.dtype(kind, name))
        whole = TensorPiece(key, data.dtype, shape, (0,) * len(shape), shape, data)
        fill_pieces(self.path, self.manifest, [whole])
        return data

    def stored(self) -> Iterator[str]:
        yield from self.manifest.tensors


def _trained(path: Path, manifest: Manifest) -> Trained:
    """How far the run had come; weights that nothing was trained with have no samples."""
    samples = _count(path, manifest.state, "train", "samples")
    return Trained(manifest.step, samples, _count(path, manifest.state, "data", "train.seq_length"))


def _count(path: Path, state: Mapping[str, Any], entry: str, key: str) -> int:
    values = state.get(entry, {})
    number = values.get(key, 0) if isinstance(values, Mapping) else None
    if type(number) is not int or number < 0:
        raise CheckpointError(
            f"{path}: its manifest says {entry}={values!r}, which has no sensible {key}"
        )
    return number


def write(source: Source, target: Path, options: WriteOptions, report: Report) -> None:
    """A checkpoint in `target/step-N`, from which a run can load.

    Another run's training state comes along if the source has it.
    """
    step = source.trained.step
    kinds = source.kinds if options.optimizer else source.kinds[:1]
    pieces = [
        _piece(source, kind, spec.name, spec.shape, options, report)
        for kind in kinds
        for spec in param_specs(source.model)
    ]
    table = [piece_info(piece) for piece in pieces]
    plan = SavePlan(step, target / f".tmp-step-{step}-00000000", [table], assign_writers([table]))
    files = write_share(plan, 0, pieces, max_file_bytes=options.max_file_bytes)
    meta: SaveMeta = {"model": source.model, "layout": {}}
    manifest = make_manifest(plan, [files], source.training_state(), meta)
    commit(plan.temporary, target / f"step-{step}", manifest)


def _piece(
    source: Source,
    kind: Kind,
    name: str,
    shape: tuple[int, ...],
    options: WriteOptions,
    report: Report,
) -> TensorPiece:
    dtype = source.dtype(kind, name)
    if kind == "param" and options.dtype is not None:
        dtype = options.dtype
    data = _Read(source, kind, name, dtype, math.prod(shape), report)
    return TensorPiece(f"{kind}/{name}", dtype, shape, (0,) * len(shape), shape, data)


class _Read(Stored):
    """A tensor of a source as `dtype`, read when it is written."""

    def __init__(
        self,
        source: Source,
        kind: Kind,
        name: str,
        dtype: torch.dtype,
        numel: int,
        report: Report,
    ) -> None:
        self._source, self._kind, self._name, self._numel = source, kind, name, numel
        self._report = report
        self.dtype = dtype

    def numel(self) -> int:
        return self._numel

    @contextlib.contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        tensor = self._source.tensor(self._kind, self._name).view(-1)
        yield retype(tensor, self.dtype, f"{self._source.path}: {self._kind} of {self._name}")
        self._report(self._kind, self._name)
