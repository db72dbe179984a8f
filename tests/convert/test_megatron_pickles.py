"""Hostile and damaged pickles: refused by name, and nothing of them runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from megads.convert.formats import open_source
from megads.convert.pickles import Inert, load_pickle, load_plain_pickle
from megads.errors import CheckpointError
from tests.convert.megatron_cases import FILE


class _Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def global_of(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def save_zip(path: Path, pickled: bytes, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in entries.items():
            archive.writestr(f"archive/{name.replace('_', '/')}", content)
    return path


def attack(marker: Path) -> dict[str, tuple[Any, str]]:
    touch = f"open({str(marker)!r}, 'w')"
    return {
        "system": (_Calls(os.system, f"touch {marker}"), rf"asks for {os.name}\.system"),
        "eval": (_Calls(eval, touch), r"asks for builtins\.eval"),
        "unknown": (
            _Calls(subprocess.Popen, ["touch", str(marker)]),
            r"asks for \w+\.Popen",
        ),
        "nested": ({"model": [{"a": _Calls(exec, touch)}]}, r"asks for builtins\.exec"),
        "getattr": (_Calls(getattr, "", "join"), r"asks for builtins\.getattr"),
    }


@pytest.mark.parametrize("name", ["system", "eval", "unknown", "nested", "getattr"])
@pytest.mark.parametrize("form", ["zip", "before zip", "plain"])
def test_calls_are_refused_by_name(name: str, form: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "file.pt"
    content, match = attack(marker)[name]
    if form == "plain":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    for load in (load_pickle, load_plain_pickle) if form == "plain" else (load_pickle,):
        with pytest.raises(CheckpointError, match=match) as error:
            load(path)
        assert str(path) in str(error.value) and not marker.exists()
    if name == "system":  # the attack is real: pickle itself runs it
        pickle.loads(pickle.dumps(content))
        assert marker.exists()


def test_a_hostile_checkpoint_is_refused_with_its_file(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "iter_0000001" / "mp_rank_00" / FILE
    path.parent.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({"args": _Calls(os.system, f"touch {marker}"), "model": {}}, path)
    with pytest.raises(CheckpointError, match=r"mp_rank_00/model_optim_rng\.pt: refused"):
        open_source(tmp_path)
    assert not marker.exists()


REBUILD = "torch._utils._rebuild_tensor_v2"
STORAGE = (
    b"(X\x07\x00\x00\x00storage"
    + global_of("torch.FloatStorage")
    + (b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ")
)
"""Four floats, as the persistent id of storage 0."""


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def tensor(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    shape = pickle.dumps((size, stride), 0)[:-1]
    parts = b"".join(b"(" + b"".join(map(number, part)) + b"t" for part in (size, stride))
    assert shape
    return global_of(REBUILD) + b"(" + STORAGE + number(offset) + parts + b"\x89Nt" + b"R."


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (0, (10**12,), (0,)),
        (0, (2, 3), (3, 1)),
        (0, (2**63,), (1,)),
        (-1, (4,), (1,)),
        (0, (-1,), (1,)),
        (3, (2,), (-1,)),
    ],
)
def test_tensors_beyond_their_storage(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    path = save_zip(tmp_path / "a", tensor(offset, size, stride), data_0=bytes(16))
    with pytest.raises(CheckpointError, match="refused: a tensor"):
        load_pickle(path)
    good = save_zip(tmp_path / "b", tensor(0, (2, 2), (2, 1)), data_0=struct.pack("4f", 1, 2, 3, 4))
    assert torch.equal(load_pickle(good), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    short = save_zip(tmp_path / "c", tensor(0, (2, 2), (2, 1)), data_0=bytes(15))
    with pytest.raises(CheckpointError, match="storage 0 has 15 bytes, and should have 16"):
        load_pickle(short)


DICT = pickle.dumps({"__code__": 1}, 2)[2:-1]


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        (global_of(REBUILD) + DICT + b"b.", "sets attributes of a function"),
        (global_of("collections.OrderedDict") + b"N" + DICT + b"\x86b.", "sets attributes"),
        (global_of("megatron.core.X") + DICT + b"b.", "sets attributes of a type"),
        (tensor(0, (4,), (1,))[:-1] + DICT + b"b.", "sets attributes of a Tensor"),
        (tensor(0, (4,), (1,))[:-1] + b"K\x00K\x01s.", "puts items into a Tensor"),
        (global_of("megatron.core.X") + b")R(K\x01e.", "puts items into a X"),
        (global_of("torch.Size") + b")\x81.", "makes an object of a function"),
        (b"X\x01\x00\x00\x00a)R.", "calls a str"),
        (tensor(0, (4,), (1,))[:-1] + b")R.", "calls a Tensor"),
        (b"(imegatron.core\nX\n.", "a step that torch.save never writes"),
        (b"\x82\x01.", "a step that torch.save never writes"),
        (b"\x96" + struct.pack("<Q", 1 << 60) + b".", "a step that torch.save never writes"),
        (b"K\x01Q.", "something other than a storage"),
        (b"(X\x06\x00\x00\x00moduleK\x01K\x02K\x03K\x04tQ.", "something other than a storage"),
        (STORAGE.replace(b"cpuK\x04", b"cpuK\x05") + b".", "storage 0 has 16 bytes"),
        (STORAGE.replace(b"0X\x03", b"9X\x03") + b".", "lacks the elements of storage 9"),
        (global_of("torch.load") + b".", r"asks for torch\.load"),
        (global_of("torch.storage._load_from_bytes") + b".", r"_load_from_bytes"),
        (global_of("argparse.FileType") + b".", r"asks for argparse\.FileType"),
        (global_of("signal.raise_signal") + b".", r"asks for signal\.raise_signal"),
        (global_of("signal.SIGTERM") + b")R.", "calls a SIGTERM"),
        (global_of("signal.SIGkill") + b".", r"asks for signal\.SIGkill"),
        (global_of("io.BytesIO") + b".", r"asks for io\.BytesIO"),
        (global_of("_io.FileIO") + b".", r"asks for _io\.FileIO"),
        (global_of("types.FunctionType") + b".", r"asks for types\.FunctionType"),
        (
            global_of("_codecs.encode") + b"X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
            "no text of",
        ),
        (b"}(" + b"K\x01" * 1001 + b"tK\x01s.", "a key of too many parts"),
        (global_of("megatronx.core.X") + b".", r"asks for megatronx\.core\.X"),
        (b"}" + b")" + b"\x85" * 5_000 + b"K\x01s.", "a key of too many parts"),
        (b"}" + b")" + b"2\x86" * 60 + b"K\x01s.", "a key of too many parts"),
        (b"(" + b")" + b"\x85" * 5_000 + b"K\x01d.", "a key of too many parts"),
        (b"\x8f(" + b")" + b"\x85" * 5_000 + b"\x90.", "a key of too many parts"),
        (b"(" + b")" + b"\x85" * 5_000 + b"\x91.", "a key of too many parts"),
        (b"N" * 10, "cannot read .*EOFError"),
        (b"", "cannot read .*EOFError"),
        (b"R.", "cannot read .*IndexError"),
        (b"h\x07.", "cannot read .*Memo"),
        (b"\xff.", "cannot read .*KeyError"),
    ],
)
def test_steps_of_a_pickle(steps: bytes, match: str, tmp_path: Path) -> None:
    path = save_zip(tmp_path / "a", steps, data_0=bytes(16))
    rebuilt = torch._utils._rebuild_tensor_v2.__code__
    with pytest.raises(CheckpointError, match=match) as error:
        load_pickle(path)
    assert str(path) in str(error.value)
    assert torch._utils._rebuild_tensor_v2.__code__ is rebuilt


def test_deep_nesting_is_only_data(tmp_path: Path) -> None:
    path = save_zip(tmp_path / "a", b")" + b"\x85" * 50_000 + b".")
    assert len(load_pickle(path)) == 1
    lists = save_zip(tmp_path / "b", b"]" * 20_000 + b"a" * 19_999 + b".")
    assert len(load_pickle(lists)) == 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_stand_ins_are_inert(protocol: int, tmp_path: Path) -> None:
    """What Transformer Engine, old Pythons and old PyTorch leave in files, and nothing real."""
    path = tmp_path / "file"
    content = [io.BytesIO(b"abc"), types.SimpleNamespace(bf16=True), signal.SIGTERM]
    path.write_bytes(pickle.dumps(content, protocol))
    buffer, namespace, number = load_plain_pickle(path)
    for value, name in ((buffer, "_io.BytesIO"), (namespace, "types.SimpleNamespace")):
        assert isinstance(value, Inert) and value.path == name
    assert buffer.state[0] == b"abc" and namespace.bf16 is True  # type: ignore[attr-defined]
    assert isinstance(number, Inert)
    path.write_bytes(global_of("signal.SIGTERM") + b".")  # by name, as some Pythons do
    by_name = load_plain_pickle(path)
    assert isinstance(by_name, Inert) and by_name.path == "signal.SIGTERM"
    old = TensorProperties(dtype=torch.bfloat16)
    path.write_bytes(pickle.dumps(old, protocol))
    properties = load_plain_pickle(path)
    assert isinstance(properties, Inert) and properties.state[0] is torch.bfloat16  # type: ignore[attr-defined]


class Foreign:
    """Pickled as a class of another package."""


@pytest.mark.parametrize("form", [True, False], ids=["zip", "before zip"])
def test_what_is_allowed_is_what_was_saved(
    form: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.arange(12.0)
    state = OrderedDict(a=base.view(3, 4)[:, 1:3], b=base, c=base.to(torch.bfloat16))
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    marked = torch.ones(3)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    foreign = Foreign()
    foreign.size = 3  # type: ignore[attr-defined]
    content = {
        "state": state,
        "tensors": (parameter, marked, torch.tensor(5), torch.empty(0, 3)),
        "plain": [None, True, 1 << 70, 0.5, "text", b"bytes", {1, 2}, torch.float16, (1, (2, ()))],
        ("a", 1): torch.Size([2, 3]),
        "foreign": foreign,
    }
    path = tmp_path / "file.pt"
    Foreign.__module__, Foreign.__qualname__ = "megatron.core.things", "Foreign"
    for name in ("megatron", "megatron.core", "megatron.core.things"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["megatron.core.things"], "Foreign", Foreign, raising=False)
    torch.save(content, path, _use_new_zipfile_serialization=bool(form))
    monkeypatch.undo()
    got = load_pickle(path)
    assert isinstance(got["state"], OrderedDict) and list(got["state"]) == ["a", "b", "c"]
    for name, value in state.items():
        assert got["state"][name].dtype == value.dtype and torch.equal(got["state"][name], value)
    for mine, theirs in zip(got["tensors"], content["tensors"], strict=True):
        assert mine.shape == theirs.shape and torch.equal(mine, theirs)
    assert got["plain"] == content["plain"] and got["a", 1] == (2, 3)
    assert isinstance(got["foreign"], Inert) and got["foreign"].size == 3  # type: ignore[attr-defined]
    assert got["foreign"].path == "megatron.core.things.Foreign"
    got["state"]["b"].zero_()
    assert torch.equal(load_pickle(path)["state"]["b"], base)


def test_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    for size in (0, 1, 4, 30, len(whole) // 2, len(whole) - 1):
        damaged = tmp_path / f"{size}.pt"
        damaged.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"{size}\.pt"):
            load_pickle(damaged)
    with pytest.raises(CheckpointError, match=r"nothing\.pt"):
        load_pickle(tmp_path / "nothing.pt")
    squeezed = tmp_path / "squeezed.pt"
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"N." + bytes(10_000_000))
    with pytest.raises(CheckpointError, match="compressed, as torch"):
        load_pickle(squeezed)
    for entries, match in (
        ({"constants.pkl": b""}, "TorchScript"),
        ({"byteorder": b"big"}, "not little-endian"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load_pickle(save_zip(tmp_path / "other.pt", b"N.", **entries))
    old = io.BytesIO()
    torch.save({"a": torch.arange(1000.0)}, old, _use_new_zipfile_serialization=False)
    for size in range(0, len(old.getvalue()), 97):
        path.write_bytes(old.getvalue()[:size])
        with pytest.raises(CheckpointError, match=r"file\.pt"):
            load_pickle(path)


def test_flipped_bytes_never_do_more_than_raise(tmp_path: Path) -> None:
    path, flips = tmp_path / "file.pt", random.Random(7)
    content = {"model": {f"{i}": torch.arange(4.0) for i in range(4)}, "args": [1, (2, "x")]}
    for form in (True, False):
        torch.save(content, path, _use_new_zipfile_serialization=form)
        whole = path.read_bytes()
        for number in range(150):
            data = bytearray(whole)
            for _ in range(flips.choice([1, 3])):
                data[flips.randrange(len(data))] ^= 1 << flips.randrange(8)
            damaged = tmp_path / f"{form}{number}.pt"
            damaged.write_bytes(data)
            with contextlib.suppress(CheckpointError):
                load_pickle(damaged)
