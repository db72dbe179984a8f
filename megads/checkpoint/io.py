"""Tensors to and from safetensors files, streaming out and memory-mapped in.

A safetensors file is an 8-byte little-endian length, a JSON header of that length (name -> dtype,
shape, byte range of the data), and the data: https://github.com/huggingface/safetensors. Files
written here are ordinary ones, which any reader of the format reads; they are written by hand to
hash and sync them in the same pass, and read by hand so that every field of the header can be
held against the manifest before a byte of data is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megads.checkpoint.blocks import BlockReader, write_blocks
from megads.checkpoint.manifest import ITEM_SIZES, FileEntry, piece_name
from megads.errors import CheckpointError, DamageError
from megads.parallel.pieces import TensorPiece

Contents = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a torch dtype. Raises CheckpointError if it has none."""
    name = str(dtype).removeprefix("torch.")
    if name not in _CODES:
        raise CheckpointError(f"tensors of type {name} cannot be stored")
    return name


def write_file(path: Path, pieces: Sequence[TensorPiece]) -> FileEntry:
    """Write pieces to a new file and return its size and digest once it is on the disk.

    Their data may be on any device; at most one piece is copied or converted at a time. Raises
    CheckpointError with the path and the system's reason.
    """
    # Largest items first keeps every tensor aligned to its item size without holes.
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
    try:
        return write_blocks(path, _parts(ordered))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read_header(reader: BlockReader, path: Path, size: int) -> tuple[dict[str, object], int]:
    """The checked header of a file, and the position where the data begins.

    Raises DamageError naming the file.
    """
    if size < 8:
        raise DamageError(f"{path} is damaged: {size} bytes have no room for a header")
    length = int.from_bytes(reader.read(0, 8).tobytes(), "little")
    text = reader.read(8, 8 + _checked_length(path, length, size)).tobytes()
    return _decode_header(path, text), 8 + length


def open_file(path: Path, size: int, contents: Contents) -> dict[str, Tensor]:
    """Map a file and return the tensors `contents` names; bytes are read when they are touched.

    `size` is the file's expected size. The tensors are private mappings: writing to them changes
    memory only. Raises CheckpointError naming the file when size, header or layout are not what
    they must be.
    """
    try:
        actual = path.stat().st_size
        if actual != size:
            raise DamageError(f"{path} is damaged: {actual} bytes instead of {size}")
        header, start = _read_header(path, size)
    except OSError as error:
        raise DamageError(f"cannot read {path}: {error}") from error
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, (dtype, shape) in contents.items():
        low, high = data_range(path, header.get(name), name, dtype, shape)
        if start + high > size:
            raise DamageError(f"{path} is damaged: {name} ends beyond the end of the file")
        data = raw[start + low : start + high]
        if (start + low) % ITEM_SIZES[dtype]:
            data = data.clone()  # legal in the format, but a view needs alignment
        tensors[name] = data.view(getattr(torch, dtype)).view(shape)
    return tensors


def _parts(pieces: Sequence[TensorPiece]) -> Iterator[memoryview]:
    """The parts of a file in order; each lives until the next is asked for."""
    yield memoryview(_encode_header(pieces))
    for piece in pieces:
        with piece.opened() as data:
            tensor = data.detach().to("cpu", piece.dtype).contiguous()
            yield memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _encode_header(pieces: Sequence[TensorPiece]) -> bytes:
    header: dict[str, object] = {}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.numel * piece.dtype.itemsize
        header[piece_name(piece.key, piece.offset)] = {
            "dtype": _CODES[dtype_name(piece.dtype)],
            "shape": list(piece.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(path: Path, size: int) -> tuple[dict[str, object], int]:
    """The JSON header and the position where the data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(_checked_length(path, length, size))
    return _decode_header(path, text), 8 + length


def _checked_length(path: Path, length: int, size: int) -> int:
    if not 2 <= length <= size - 8:
        raise DamageError(f"{path} is damaged: its header cannot be {length} bytes long")
    return length


def _decode_header(path: Path, text: bytes) -> dict[str, object]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is damaged: unreadable header: {error}") from None
    if not isinstance(header, dict):
        raise DamageError(f"{path} is damaged: its header is not a table of tensors")
    return header


def data_range(
    path: Path, entry: object, name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[int, int]:
    """Byte range of a tensor's data, after its header entry has been held against the manifest.

    Counted from where the data begins. Raises DamageError naming file and tensor.
    """
    if not isinstance(entry, dict):
        raise DamageError(f"{path} is damaged: it does not hold {name}")
    if entry.get("dtype") != _CODES[dtype] or entry.get("shape") != list(shape):
        raise DamageError(
            f"{path} is damaged: {name} is {entry.get('dtype')} {entry.get('shape')}, the manifest "
            f"says {_CODES[dtype]} {list(shape)}"
        )
    offsets = entry.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(value) is int and value >= 0 for value in offsets)
        or offsets[1] - offsets[0] != math.prod(shape) * ITEM_SIZES[dtype]
    ):
        raise DamageError(f"{path} is damaged: impossible byte range {offsets} of {name}")
    return offsets[0], offsets[1]
