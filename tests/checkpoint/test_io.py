from __future__ import annotations

import itertools
import json
import os
import struct
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch

from megads.checkpoint import io
from megads.checkpoint.blocks import FileDigest
from megads.errors import CheckpointError
from megads.parallel.pieces import TensorPiece

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32]
DTYPES += [torch.int16, torch.int8, torch.uint8, torch.bool]


def piece(key: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorPiece:
    shape = tuple(tensor.shape)
    return TensorPiece(key, dtype or tensor.dtype, shape, (0,) * len(shape), shape, tensor)


def some_pieces() -> list[TensorPiece]:
    torch.manual_seed(1)
    out = [
        piece(f"k{i}", (torch.randn(3, 5) * 50).to(dtype)) for i, dtype in enumerate(DTYPES[::-1])
    ]
    return [*out, piece("scalar", torch.tensor(7.5)), piece("odd", torch.ones(7).bool())]


def contents(pieces: list[TensorPiece]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{p.key}@{','.join('0' for _ in p.shape)}": (str(p.dtype)[6:], p.shape) for p in pieces
    }


def parse(path: Path) -> tuple[dict, bytes]:
    """A safetensors file taken apart by its published layout."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_the_file_is_a_safetensors_file(tmp_path):
    pieces = some_pieces()
    io.write_file(tmp_path / "a.safetensors", pieces)
    header, data = parse(tmp_path / "a.safetensors")
    assert len(header) == len(pieces)
    at = header["k9@0,0"]["data_offsets"]
    assert header["k9@0,0"]["dtype"] == "F32"
    values = numpy.frombuffer(data[at[0] : at[1]], "<f4").reshape(3, 5)
    assert (values == pieces[9].data.numpy()).all()
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert ends[0][0] == 0 and ends[-1][1] == len(data)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends)), "no holes"
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    for p, name in zip(pieces, contents(pieces), strict=True):
        assert loaded[name].dtype == p.dtype and torch.equal(loaded[name], p.data)


def test_size_and_digest_are_those_of_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    entry = io.write_file(path, some_pieces())
    digest = FileDigest()
    digest.update(memoryview(path.read_bytes()))
    assert entry.size == path.stat().st_size
    assert entry.digest == digest.text()


def test_read_back_from_own_and_from_the_libraries_files(tmp_path):
    pieces = some_pieces()
    io.write_file(tmp_path / "own.safetensors", pieces)
    named = {name: p.data for p, name in zip(pieces, contents(pieces), strict=True)}
    safetensors.torch.save_file(named, tmp_path / "library.safetensors")
    for name in ("own", "library"):
        path = tmp_path / f"{name}.safetensors"
        loaded = io.open_file(path, path.stat().st_size, contents(pieces))
        for key, tensor in named.items():
            assert loaded[key].dtype == tensor.dtype and torch.equal(loaded[key], tensor)


def test_unaligned_tensors_are_legal_in_the_format(tmp_path):
    entries = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "f": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    header = json.dumps(entries).encode()
    raw = struct.pack("<Q", len(header)) + header + b"abc" + struct.pack("<2f", 1.5, -2.0)
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    assert io.open_file(path, len(raw), {"f": ("float32", (2,))})["f"].tolist() == [1.5, -2.0]


def test_views_and_conversions_on_the_way_out(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    column = TensorPiece("c", torch.float32, (3, 4), (0, 1), (3, 2), matrix[:, 1:3])
    flat = TensorPiece("f", torch.bfloat16, (2, 3), (0, 0), (2, 3), torch.arange(9.0)[2:8])
    io.write_file(tmp_path / "a.safetensors", [column, flat])
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert loaded["c@0,1"].tolist() == [[1, 2], [5, 6], [9, 10]]
    assert loaded["f@0,0"].dtype == torch.bfloat16
    assert loaded["f@0,0"].tolist() == [[2, 3, 4], [5, 6, 7]]


def test_touching_loaded_tensors_leaves_the_file_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    io.write_file(path, [piece("w", torch.ones(4))])
    before = path.read_bytes()
    io.open_file(path, len(before), {"w@0": ("float32", (4,))})["w@0"].zero_()
    assert path.read_bytes() == before


def header_of(**changes) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    return json.dumps({"w@0": entry}).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "header"),
        (b"\x01\x00\x00", "header"),
        (struct.pack("<Q", 2**63) + b"{}", "header cannot be"),
        (struct.pack("<Q", 4) + b"{{}}" + bytes(16), "unreadable header"),
        (struct.pack("<Q", 40000) + b"[" * 40000 + bytes(16), "unreadable header"),
        (struct.pack("<Q", 2) + b"[]" + bytes(16), "not a table"),
        (struct.pack("<Q", 2) + b"{}" + bytes(16), "does not hold w@0"),
        (header_of(dtype="F16"), "F16"),
        (header_of(shape=[2, 2]), "manifest says"),
        (header_of(data_offsets=[0, 12]), "byte range"),
        (header_of(data_offsets=[-16, 0]), "byte range"),
        (header_of(data_offsets=[0.0, 16.0]), "byte range"),
        (header_of(data_offsets="0-16"), "byte range"),
        (header_of(data_offsets=[16, 32]), "beyond the end"),
        (header_of(data_offsets=[2**70, 2**70 + 16]), "beyond the end"),
    ],
)
def test_damaged_headers_are_refused_by_name(tmp_path, raw, message):
    if raw.startswith(b"{"):
        raw = struct.pack("<Q", len(raw)) + raw + bytes(16)
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"a\.safetensors.*{message}"):
        io.open_file(path, len(raw), {"w@0": ("float32", (4,))})


def test_truncated_and_missing_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    size = io.write_file(path, [piece("w", torch.ones(4))]).size
    os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match=rf"{size - 1} bytes instead of {size}"):
        io.open_file(path, size, {"w@0": ("float32", (4,))})
    with pytest.raises(CheckpointError, match=r"cannot read .*b\.safetensors"):
        io.open_file(tmp_path / "b.safetensors", size, {})


def test_a_full_disk_is_reported_with_path_and_reason():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")

    class Full:
        """A new file on a disk that has no space left."""

        def open(self, mode, buffering):
            return full.open("wb", buffering=buffering)

        def __str__(self):
            return "here/a.safetensors"

    with pytest.raises(CheckpointError, match=r"here/a\.safetensors.*No space left"):
        io.write_file(Full(), [piece("w", torch.ones(4))])  # type: ignore[arg-type]


def test_types_without_a_name_in_the_format_are_refused():
    with pytest.raises(CheckpointError, match="complex64"):
        io.dtype_name(torch.complex64)
