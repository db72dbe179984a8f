"""The description of a checkpoint: `manifest.json`, read as if a stranger had written it. Pure.

A checkpoint is a directory `step-N` with

    *.safetensors   pieces of tensors, each stored as its own tensor named "key@off0,off1"
    manifest.json   which piece is where in which global tensor, the model, the training state
    COMMIT          the SHA-256 of manifest.json; without it the checkpoint does not exist

Keys are layout-free ("param/blocks.0.mlp.up.weight", "exp_avg/..."), tensors are unpadded and
fused projections are in canonical order (see `megads.parallel.sharding`), so nothing in here
depends on the layout that wrote it; `layout` is recorded for people.

Everything is checked when a manifest is made or read: files are plain names inside the directory,
the pieces of each tensor fill it exactly, and no file is too small for what is said to be in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from megads.checkpoint.tiling import tiling_problem
from megads.config.model import ModelConfig
from megads.errors import CheckpointError

MANIFEST, COMMIT = "manifest.json", "COMMIT"
FORMAT_VERSION = 2
BLOCK = 1 << 20
"""Bytes of a file that have a digest of their own."""
SUMS = "sums:"
"""Before the digests of all blocks of a file, 8 hexadecimal digits each."""

DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
ITEM_SIZES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,100}\.safetensors$")]
Key = Annotated[str, Field(min_length=1, max_length=500)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**63)]

# Fields that may differ between the saved model and the one that is loaded into: they change
# neither the parameters nor what the trained model computes from them.
FREE_FIELDS = frozenset(
    {
        "name",
        "vocab_multiple",
        "hidden_dropout",
        "attention_dropout",
        "init_std",
        "init_scale_output",
    }
)


class Record(BaseModel):
    """Base of the manifest's records: immutable, no unknown keys, no type guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(Record):
    """One safetensors file: its size in bytes and the digests of its blocks.

    Files of format version 1 have the CRC-32 of the whole file instead.
    """

    size: Size
    digest: Annotated[str, Field(pattern=r"^(crc32:[0-9a-f]{8}|sums:([0-9a-f]{8})+)$")]

    @model_validator(mode="after")
    def _check_count(self) -> FileEntry:
        blocks = -(-self.size // BLOCK)
        if self.digest.startswith(SUMS) and len(self.digest) != len(SUMS) + 8 * blocks:
            raise ValueError(f"{self.size} bytes need the digests of {blocks} blocks")
        return self

    def block_digest(self, number: int) -> str | None:
        """What block `number` must have; None in files of version 1."""
        if not self.digest.startswith(SUMS):
            return None
        start = len(SUMS) + 8 * number
        return self.digest[start : start + 8]


class PieceEntry(Record):
    """`global[offset : offset + shape]` is the whole tensor `tensor` of `file`."""

    file: FileName
    tensor: Annotated[str, Field(min_length=1, max_length=600)]
    offset: tuple[Count, ...]
    shape: tuple[Size, ...]


class TensorEntry(Record):
    """One global tensor and the pieces it is stored in."""

    dtype: DType
    shape: tuple[Size, ...]
    pieces: tuple[PieceEntry, ...]

    @model_validator(mode="after")
    def _check_tiling(self) -> TensorEntry:
        problem = tiling_problem(self.shape, [(p.offset, p.shape) for p in self.pieces])
        if problem:
            raise ValueError(problem)
        return self


class Manifest(Record):
    """What a checkpoint holds. `state` is the run's training state, as plain JSON values."""

    format: Literal["megads"] = "megads"
    version: Literal[1, 2] = 2
    step: Count
    model: ModelConfig
    layout: dict[str, int]
    state: dict[str, JsonValue]
    tensors: dict[Key, TensorEntry]
    files: dict[FileName, FileEntry]

    @model_validator(mode="after")
    def _check_files(self) -> Manifest:
        needed = dict.fromkeys(self.files, 8)
        seen: set[tuple[str, str]] = set()
        for key, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file not in needed:
                    raise ValueError(f"{key} is in {piece.file}, which is not among the files")
                if (piece.file, piece.tensor) in seen:
                    raise ValueError(f"{piece.tensor} of {piece.file} is used twice")
                seen.add((piece.file, piece.tensor))
                needed[piece.file] += math.prod(piece.shape) * ITEM_SIZES[entry.dtype]
        for name, size in needed.items():
            if self.files[name].size < size:
                raise ValueError(
                    f"{name} has {self.files[name].size} bytes but must hold at least {size}"
                )
        return self

    def by_file(self, names: Iterable[str]) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """file -> tensor name in it -> (dtype, shape), of these files."""
        contents: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in names}
        for entry in self.tensors.values():
            for piece in entry.pieces:
                if piece.file in contents:
                    contents[piece.file][piece.tensor] = (entry.dtype, piece.shape)
        return contents


def piece_name(key: str, offset: tuple[int, ...]) -> str:
    """Name of a piece inside its file: "key@off0,off1"."""
    return f"{key}@{','.join(map(str, offset))}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises CheckpointError for values JSON has no spelling for."""
    try:
        text = json.dumps(manifest.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise CheckpointError(f"the training state cannot be written as JSON: {error}") from error
    return text.encode() + b"\n"


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Check and decode the bytes of manifest.json; `source` names them in errors.

    Raises CheckpointError with the first few problems.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        version = _version(data)
        if version is not None and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{source}: format version {version} is newer than this megads, which reads up to "
                f"{FORMAT_VERSION}"
            ) from None
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'manifest'}: {e['msg']}" for e in error.errors()
        ]
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        text = "; ".join(p[:300] for p in problems[:3])
        raise CheckpointError(f"{source} is not a valid manifest: {text}{more}") from None


def _version(data: bytes) -> int | None:
    """The format version of something that may not be a manifest at all."""
    try:
        version = json.loads(data)["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def commit_text(manifest_bytes: bytes) -> str:
    """What COMMIT must say about a manifest."""
    return f"sha256:{hashlib.sha256(manifest_bytes).hexdigest()}\n"


def model_differences(saved: ModelConfig, wanted: ModelConfig) -> list[str]:
    """ "field: saved value, wanted value" of every difference that makes them different models.

    `max_seq_length` counts only where it is the size of a table of learned positions.
    """
    differences = []
    for name in ModelConfig.model_fields:
        if name in FREE_FIELDS:
            continue
        if name == "max_seq_length" and saved.position == wanted.position != "learned":
            continue
        before, now = getattr(saved, name), getattr(wanted, name)
        if before != now:
            differences.append(f"{name}: {before!r} in the checkpoint, {now!r} wanted")
    return differences
