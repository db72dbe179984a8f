"""From a committed checkpoint into the tensors of one rank; nothing here is collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megads.checkpoint import io
from megads.checkpoint.blocks import BlockReader, check_whole
from megads.checkpoint.directory import read_manifest
from megads.checkpoint.manifest import (
    ITEM_SIZES,
    SUMS,
    FileEntry,
    Manifest,
    TensorEntry,
    model_differences,
)
from megads.checkpoint.reshard import Read, plan_reads
from megads.config.model import ModelConfig
from megads.errors import CheckpointError, DamageError
from megads.parallel.pieces import TensorPiece

_ROWS = 2 << 20  # bytes copied at a time: they are still in the cache after they were checked
_JOB = 64 << 20  # bytes that one thread reads before it takes the next job


@dataclass(frozen=True)
class _Copy:
    """A stored part for a wanted piece; `low` and `high` are where in its file it lies."""

    piece: TensorPiece
    read: Read
    dtype: str
    shape: tuple[int, ...]
    low: int
    high: int


def check_model(path: Path, manifest: Manifest, model: ModelConfig) -> None:
    """Raise CheckpointError, naming the fields, unless the checkpoint holds this model."""
    differences = model_differences(manifest.model, model)
    if differences:
        raise CheckpointError(f"{path} holds another model: {'; '.join(differences)}")


def check_layers(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for more layers than there can be: a model is made of their number,
    which in a file from elsewhere may be anything."""
    if manifest.model.num_layers > len(manifest.tensors):
        raise CheckpointError(
            f"{path} cannot hold {manifest.model.num_layers} layers: there are only "
            f"{len(manifest.tensors)} tensors"
        )


def fill_pieces(path: Path, manifest: Manifest, wanted: Sequence[TensorPiece]) -> None:
    """Copy stored values into the wanted pieces, reading and checking only the blocks needed.

    Raises DamageError naming the file that is not what was committed, CheckpointError when the
    checkpoint does not hold what is wanted.
    """
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
    contents = manifest.by_file(reads)
    jobs: list[tuple[Path, FileEntry, list[_Copy]]] = []
    for name, copies in reads.items():
        file, expected = path / name, manifest.files[name]
        if not expected.digest.startswith(SUMS):
            check_whole(file, expected)
        placed = _placed(file, expected, contents[name], copies)
        jobs += [(file, expected, job) for job in _jobs(placed)]
    # Stored pieces may share a page of their file, which two threads must not change at once.
    in_memory = all(isinstance(piece.data, Tensor) for piece in wanted)
    threads = torch.get_num_threads() if in_memory else 1
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda job: _copy(*job), jobs):
            pass


def _placed(
    path: Path,
    entry: FileEntry,
    contents: Mapping[str, tuple[str, tuple[int, ...]]],
    copies: Iterable[tuple[TensorPiece, Read]],
) -> list[_Copy]:
    """The copies from one file in the order of the file, after its header has been checked."""
    with BlockReader(path, entry) as reader:
        header, start = io.read_header(reader, path, entry.size)
    placed = []
    for piece, read in copies:
        dtype, shape = contents[read.tensor]
        low, high = io.data_range(path, header.get(read.tensor), read.tensor, dtype, shape)
        if start + high > entry.size:
            raise DamageError(f"{path} is damaged: {read.tensor} ends beyond the end of the file")
        first, row = _first_row(read), _row_bytes(dtype, shape)
        low += start + first.start * row
        high = low + (first.stop - first.start) * row
        placed.append(_Copy(piece, read, dtype, shape, low, high))
    return sorted(placed, key=lambda copy: copy.low)


def _jobs(copies: Sequence[_Copy]) -> Iterator[list[_Copy]]:
    """Runs of copies of about the same size."""
    job: list[_Copy] = []
    filled = 0
    for copy in copies:
        job.append(copy)
        filled += copy.high - copy.low
        if filled >= _JOB:
            yield job
            job, filled = [], 0
    if job:
        yield job


def _copy(path: Path, entry: FileEntry, copies: Sequence[_Copy]) -> None:
    end = max(copy.high for copy in copies)
    with torch.no_grad(), BlockReader(path, entry) as reader:
        for copy in copies:
            with copy.piece.opened(write=True) as data:
                _copy_rows(reader, copy, data, end)


def _copy_rows(reader: BlockReader, copy: _Copy, data: Tensor, end: int) -> None:
    """Copy some rows at a time; of each, the part that is wanted."""
    first, row = _first_row(copy.read), _row_bytes(copy.dtype, copy.shape)
    rows, step = first.stop - first.start, max(1, _ROWS // row)
    target = data[copy.read.target] if copy.shape else data
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        raw = torch.from_numpy(
            reader.read(copy.low + start * row, copy.low + stop * row, ahead=end)
        )
        if raw.data_ptr() % ITEM_SIZES[copy.dtype]:
            raw = raw.clone()  # legal in the format, but a view needs alignment
        values = raw.view(getattr(torch, copy.dtype))
        if copy.shape:
            part = values.view(stop - start, *copy.shape[1:])[(slice(None), *copy.read.source[1:])]
            target[start:stop].copy_(part)
        else:
            target.copy_(values[0])


def _first_row(read: Read) -> slice:
    return read.source[0] if read.source else slice(0, 1)


def _row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:]) * ITEM_SIZES[dtype]


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

    Raises DamageError naming the first bad file.
    """
    manifest = read_manifest(checkpoint)
    contents = manifest.by_file(manifest.files)
    for name, entry in manifest.files.items():
        path = checkpoint / name
        check_whole(path, entry)
        io.open_file(path, entry.size, contents[name])
    return manifest
