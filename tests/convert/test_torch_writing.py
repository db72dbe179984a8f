"""Files as torch.save writes them, of tensors made one at a time: read by PyTorch itself."""

from __future__ import annotations

import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.convert.pickles import load_pickle
from megads.convert.torch_writing import Pending, save
from megads.errors import CheckpointError

TENSORS = {
    "a": torch.arange(30.0).view(5, 6),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "number": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "halves": torch.arange(1001.0).bfloat16(),
    "halves too": torch.arange(7.0).half(),
    "doubles": torch.arange(300.0).double(),
}


def pending(tensor: Tensor) -> Pending:
    return Pending(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 100], ids=["small", "as if large"])
def test_torch_reads_it(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped or not; with sizes of 64 bits as well, as files of more than 2 GiB have them."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    path = tmp_path / "file.pt"
    content = {"model": {name: pending(tensor) for name, tensor in TENSORS.items()}, "step": 3}
    save(content, path)
    mine: Any = load_pickle(path)
    for read in (torch.load(path), torch.load(path, mmap=True), mine):
        assert read["step"] == 3 and list(read["model"]) == list(TENSORS)
        for name, tensor in TENSORS.items():
            got = read["model"][name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert got.is_contiguous() and torch.equal(got, tensor), name
    for tensor in torch.load(path, mmap=True)["model"].values():
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make() -> Tensor:
        assert all(earlier() is None for earlier in made)
        tensor = torch.ones(100)
        made.append(weakref.ref(tensor))
        return tensor

    save([Pending((100,), torch.float32, make) for _ in range(4)], tmp_path / "file.pt")
    assert len(made) == 4


def test_tensors_that_are_not_as_said_are_refused(tmp_path: Path) -> None:
    for shape, dtype in (((2, 3), torch.float32), ((6,), torch.bfloat16)):
        with pytest.raises(CheckpointError, match=r"and is of torch.float32 and shape \(6,\)"):
            save(Pending(shape, dtype, lambda: torch.zeros(6)), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"cannot write torch.int64; .* --dtype"):
        save(pending(torch.zeros(2, dtype=torch.int64)), tmp_path / "file.pt")
