"""From a committed checkpoint into the tensors of one rank; nothing here is collective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megads.checkpoint import io
from megads.checkpoint.directory import read_manifest
from megads.checkpoint.manifest import Manifest, TensorEntry, model_differences
from megads.checkpoint.reshard import Read, plan_reads
from megads.config.model import ModelConfig
from megads.errors import CheckpointError
from megads.parallel.pieces import TensorPiece


def check_model(path: Path, manifest: Manifest, model: ModelConfig) -> None:
    """Raise CheckpointError, naming the fields, unless the checkpoint holds this model."""
    differences = model_differences(manifest.model, model)
    if differences:
        raise CheckpointError(f"{path} holds another model: {'; '.join(differences)}")


def fill_pieces(path: Path, manifest: Manifest, wanted: Sequence[TensorPiece]) -> None:
    """Copy stored values into the wanted pieces, one file after the other."""
    missing = sorted({piece.key for piece in wanted} - manifest.tensors.keys())
    if missing:
        some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise CheckpointError(f"{path} does not hold {some}")
    reads: dict[str, list[tuple[TensorPiece, Read]]] = {}
    for piece in wanted:
        entry = manifest.tensors[piece.key]
        _check_piece(path, piece, entry)
        for read in plan_reads(piece.key, entry, tuple(piece.offset), tuple(piece.shape)):
            reads.setdefault(read.file, []).append((piece, read))
    contents = manifest.by_file()
    with torch.no_grad():
        for name, copies in reads.items():
            tensors = io.open_file(path / name, manifest.files[name].size, contents[name])
            for piece, read in copies:
                with piece.opened(write=True) as data:
                    data[read.target].copy_(tensors[read.tensor][read.source])


def _check_piece(path: Path, piece: TensorPiece, entry: TensorEntry) -> None:
    if tuple(piece.global_shape) != entry.shape:
        raise CheckpointError(
            f"{path}: {piece.key} has shape {list(entry.shape)}, not {list(piece.global_shape)}"
        )
    stored = getattr(torch, entry.dtype)
    if stored != piece.data.dtype and not (
        stored.is_floating_point and piece.data.dtype.is_floating_point
    ):
        raise CheckpointError(
            f"{path}: {piece.key} is {entry.dtype} and cannot become "
            f"{str(piece.data.dtype).removeprefix('torch.')}"
        )


def verify(checkpoint: Path) -> Manifest:
    """Read a committed checkpoint completely and hold every byte against its digests.

    Raises CheckpointError naming the first bad file.
    """
    manifest = read_manifest(checkpoint)
    contents = manifest.by_file()
    for name, entry in manifest.files.items():
        path = checkpoint / name
        io.open_file(path, entry.size, contents[name])
        digest = io.file_digest(path)
        if digest != entry.digest:
            raise CheckpointError(f"{path} is damaged: digest {digest} instead of {entry.digest}")
    return manifest
