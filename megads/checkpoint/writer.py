"""One rank's part in a save: what it holds, what it writes, how the whole is described."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError

from megads.checkpoint import io
from megads.checkpoint.directory import sync_directory
from megads.checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry, piece_name
from megads.checkpoint.reshard import PieceInfo
from megads.config.model import ModelConfig
from megads.errors import CheckpointError
from megads.parallel.pieces import TensorPiece


class SaveMeta(TypedDict):
    """What else a checkpoint says: the model (needed to load it), and the layout, for people."""

    model: ModelConfig | dict[str, Any]
    layout: dict[str, int]


@dataclass(frozen=True)
class SavePlan:
    """One save, the same on all ranks: where it goes and which pieces each rank writes."""

    step: int
    temporary: Path
    tables: list[list[PieceInfo]]
    writes: list[list[int]]


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk, and which of its rank's pieces it holds."""

    name: str
    entry: FileEntry
    indices: list[int]


def write_share(
    plan: SavePlan, rank: int, mine: Sequence[TensorPiece], *, max_file_bytes: int
) -> list[WrittenFile]:
    """Write the pieces that `plan` gives to this rank; they are on the disk on return.

    Raises CheckpointError with the path and the system's reason.
    """
    share = {index: mine[index] for index in plan.writes[rank]}
    return write_files(plan, rank, share, max_file_bytes=max_file_bytes)


def write_files(
    plan: SavePlan,
    rank: int,
    share: Mapping[int, TensorPiece],
    *,
    max_file_bytes: int,
    first: int = 0,
) -> list[WrittenFile]:
    """Write some of this rank's pieces, by index, to files numbered from `first` on.

    They are on the disk on return. Raises CheckpointError with the path and the system's reason.
    """
    files: list[WrittenFile] = []
    try:
        plan.temporary.mkdir(parents=True, exist_ok=True)
        for indices in _split(plan.tables[rank], list(share), max_file_bytes):
            name = f"rank{rank:05d}-part{first + len(files):05d}.safetensors"
            entry = io.write_file(plan.temporary / name, [share[index] for index in indices])
            files.append(WrittenFile(name, entry, indices))
        sync_directory(plan.temporary)
    except OSError as error:
        raise CheckpointError(f"cannot write {plan.temporary}: {error}") from error
    return files


def piece_info(piece: TensorPiece) -> PieceInfo:
    """What the other ranks must know of a piece. Raises CheckpointError if its data cannot fit."""
    if piece.data.numel() != piece.numel:
        raise CheckpointError(
            f"{piece.key}: {piece.data.numel()} elements cannot be a piece of shape "
            f"{list(piece.shape)}"
        )
    return PieceInfo(
        piece.key,
        io.dtype_name(piece.dtype),
        tuple(piece.global_shape),
        tuple(piece.offset),
        tuple(piece.shape),
    )


def state_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """A fingerprint of every entry of the state, down to the entries of its own tables.

    Raises CheckpointError if the state is not plain JSON.
    """
    digests = {}
    for key, value in state.items():
        table = value if isinstance(value, Mapping) else None
        leaves = {key: value} if table is None else {f"{key}.{k}": v for k, v in table.items()}
        for name, leaf in leaves.items():
            try:
                text = json.dumps(leaf, sort_keys=True, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{name} of the training state is not plain JSON: {error}"
                ) from error
            digests[name] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def _split(table: Sequence[PieceInfo], indices: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a rank's pieces into files of at most `limit` bytes, or of one piece."""
    files: list[list[int]] = []
    filled = 0
    for index in indices:
        size = table[index].nbytes
        if not files or filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(index)
        filled += size
    return files


def make_manifest(
    plan: SavePlan, files: list[list[WrittenFile]], state: Mapping[str, Any], meta: SaveMeta
) -> Manifest:
    """The manifest of a save; `files[r]` are the files rank r wrote."""
    pieces: dict[str, list[PieceEntry]] = {}
    first: dict[str, PieceInfo] = {}
    for table, written in zip(plan.tables, files, strict=True):
        for file in written:
            for info in (table[index] for index in file.indices):
                first.setdefault(info.key, info)
                name = piece_name(info.key, info.offset)
                pieces.setdefault(info.key, []).append(
                    PieceEntry(file=file.name, tensor=name, offset=info.offset, shape=info.shape)
                )
    try:
        return Manifest(
            step=plan.step,
            model=ModelConfig.model_validate(meta["model"]),
            layout=dict(meta["layout"]),
            state=dict(state),
            tensors={
                key: TensorEntry(
                    dtype=first[key].dtype,  # type: ignore[arg-type]
                    shape=first[key].global_shape,
                    pieces=tuple(sorted(pieces[key], key=lambda piece: piece.offset)),
                )
                for key in sorted(pieces)
            },
            files={file.name: file.entry for written in files for file in written},
        )
    except ValidationError as error:
        raise CheckpointError(f"cannot describe the checkpoint: {error}") from error
