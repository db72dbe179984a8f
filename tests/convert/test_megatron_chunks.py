"""Global tensors in chunks: what `.metadata` says is held against the files, and against itself."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from megads.convert.megatron.chunks import read_box, read_contents
from megads.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_metadata_that_points_elsewhere(tmp_path: Path) -> None:
    """The files that `.metadata` names are in its folder, and chunks in their tensors."""
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert torch.equal(read_box(read_contents(tmp_path).tensors["a"], None), tensors["a"])
    assert torch.equal(read_box(read_contents(tmp_path).tensors["a"], 1), tensors["a"][1])
    original = (tmp_path / ".metadata").read_bytes()

    def change(edit: Any) -> None:
        metadata: Metadata = pickle.loads(original)
        edit(metadata, next(iter(metadata.storage_data.values())))
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    for name in ("../../x", "/etc/passwd", "a/b", "..", ""):
        change(lambda metadata, info, name=name: setattr(info, "relative_path", name))
        with pytest.raises(CheckpointError, match="which is no file of"):
            read_contents(tmp_path)
    for attribute, value, match in (
        ("offset", -5, "ends at byte"),
        ("length", 1 << 50, "ends at byte"),
        ("length", 10, "is not in 10 bytes"),
        ("length", 24, "damaged or cut short"),
        ("transform_descriptors", ["zstd"], "compressed or encrypted"),
    ):
        change(lambda metadata, info, a=attribute, v=value: setattr(info, a, v))
        with pytest.raises(CheckpointError, match=match):
            read_box(read_contents(tmp_path).tensors["a"], None)

    def shape(metadata: Metadata, info: Any) -> None:
        metadata.state_dict_metadata["a"].size = torch.Size([1 << 40, 3])  # type: ignore[union-attr]

    change(shape)
    with pytest.raises(CheckpointError, match="cover 6 of the"):
        read_contents(tmp_path)

    def box(metadata: Metadata, info: Any) -> None:
        chunk = metadata.state_dict_metadata["a"].chunks[0]  # type: ignore[union-attr]
        chunk.sizes = torch.Size([3, 3])

    change(box)
    with pytest.raises(CheckpointError, match="is not inside"):
        read_contents(tmp_path)


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], None),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], r"overlaps the one at \[0, 0\]"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], r"piece at \[1, 0\] .* overlaps"),
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "pieces cover 9 of the 12 elements"),
        ([((0, 0), (2, 3)), ((3, 0), (2, 3))], "is not inside"),
    ],
)
def test_chunks_fill_their_tensor_exactly(
    boxes: list[tuple[tuple[int, int], tuple[int, int]]], match: str | None, tmp_path: Path
) -> None:
    """Twice the same chunk has as many elements as there should be, and leaves a hole."""
    whole = torch.arange(6.0).view(2, 3)
    save({"a": whole}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (index, info), entry = (
        next(iter(metadata.storage_data.items())),
        metadata.state_dict_metadata["a"],
    )
    entry.size = torch.Size([4, 3])  # type: ignore[union-attr]
    entry.chunks = [  # type: ignore[union-attr]
        ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes
    ]
    for offset, _ in boxes:
        place = copy.copy(index)
        object.__setattr__(place, "offset", torch.Size(offset))
        metadata.storage_data[place] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if match is None:
        assert torch.equal(read_box(read_contents(tmp_path).tensors["a"], None), whole.repeat(2, 1))
        return
    with pytest.raises(CheckpointError, match=rf"chunks of a .*{match}"):
        read_contents(tmp_path)
