"""Pickled checkpoints, read without running anything that is in them.

`torch.save` writes pickles, which name classes and functions to be called. Here a name is looked
up in a list of harmless ones; classes of the software that wrote the file become inert stand-ins
that keep what they were given; any other name is refused. What a pickle may do with the objects
it has made is limited as well: it calls nothing but what the list has, sets attributes of
stand-ins only, and puts items into plain containers only.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.pickle_names import FUNCTIONS, Inert, StorageType, look_up
from megads.convert.torch_files import Archive, MappedFile, Span
from megads.errors import CheckpointError

__all__ = ["Inert", "load_pickle", "load_plain_pickle"]

_MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle of a file written by torch.save before version 1.6."""
_KEY_LIMIT = 1000
"""Most parts of a dictionary's key. Hashing a deeply nested one would exhaust the stack."""

Storages = Callable[[tuple[Any, ...]], Tensor]
"""The elements that a persistent id of torch.save stands for."""


def load_pickle(path: Path, window: Span | None = None) -> Any:
    """What `torch.save` wrote to `path`; tensors are mapped, and read when they are touched.

    `window`: the part of the file to read, if it is an archive inside a larger file. Raises
    CheckpointError for a file that cannot be read, or names something that is not allowed.
    """
    with _Named(path):
        file = MappedFile(path)
        with open(path, "rb") as handle:
            zipped = window is not None or handle.read(4) == b"PK\x03\x04"
            if zipped:
                archive = Archive(file, window)
                return _Unpickler(io.BytesIO(archive.pickled), _of_archive(archive)).load()
            handle.seek(0)
            return _load_old(file, handle)


def load_plain_pickle(path: Path) -> Any:
    """What `pickle.dump` wrote to `path`; it holds no tensors.

    Raises CheckpointError like `load_pickle`.
    """
    with _Named(path):
        return _Unpickler(io.BytesIO(path.read_bytes()), _no_storages).load()


class _Named:
    """Turns what goes wrong while reading `path` into a CheckpointError that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{self._path}: {error}") from None
        if isinstance(error, Exception):
            text = f"cannot read {self._path}: {type(error).__name__}: {error}"
            raise CheckpointError(text) from error


def _of_archive(archive: Archive) -> Storages:
    def find(identity: tuple[Any, ...]) -> Tensor:
        kind, key, _, count = identity
        return archive.storage(str(key), kind.dtype, int(count))

    return find


def _no_storages(identity: tuple[Any, ...]) -> Tensor:
    raise CheckpointError("refused: the file asks for a tensor outside it")


def _load_old(file: MappedFile, handle: io.BufferedReader) -> Any:
    """The format before zip archives: pickles one after the other, then each storage's elements.

    Elements come after the pickle that refers to them, and only their order is stored, so that the
    pickle is read twice: to find out their types, and with the elements in place.
    """
    if _Unpickler(handle, _no_storages).load() != _MAGIC:
        raise CheckpointError("is neither an archive of torch.save nor its format before that")
    for _ in ("protocol", "sizes of integers"):
        _Unpickler(handle, _no_storages).load()
    start = handle.tell()
    types: dict[str, torch.dtype] = {}

    def note(identity: tuple[Any, ...]) -> Tensor:
        types[str(identity[1])] = identity[0].dtype
        return torch.empty(int(identity[3]), dtype=identity[0].dtype, device="meta")

    _Unpickler(handle, note).load()
    elements: dict[str, Tensor] = {}
    for key in _Unpickler(handle, _no_storages).load():
        count = int.from_bytes(handle.read(8), "little")
        elements[key] = file.elements(handle.tell(), count, types[key])
        handle.seek(count * types[key].itemsize, io.SEEK_CUR)

    def find(identity: tuple[Any, ...]) -> Tensor:
        kind, key, _, count, view = identity
        whole = elements[str(key)]
        if whole.dtype != kind.dtype or len(whole) != int(count):
            raise CheckpointError(f"storage {key} has {len(whole)} elements, and should {count}")
        return whole if view is None else whole[int(view[1]) : int(view[1]) + int(view[2])]

    handle.seek(start)
    return _Unpickler(handle, find).load()


_STEPS: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)


class _Unpickler(pickle._Unpickler):
    """The unpickler written in Python, whose every step can be overridden."""

    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: Any, storages: Storages) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        return look_up(module, name)

    def persistent_load(self, pid: Any) -> Tensor:
        if not (isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"):
            raise CheckpointError("refused: the file refers to something other than a storage")
        if not isinstance(pid[1], StorageType):
            raise CheckpointError("refused: the file has a storage of no known type")
        return self._storages(pid[1:])


def _may_call(function: Any) -> None:
    inert = isinstance(function, type) and issubclass(function, Inert)
    if not inert and not any(function is allowed for allowed in FUNCTIONS):
        raise CheckpointError(f"refused: the file calls a {type(function).__name__}")


def _may_make(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Inert)):
        raise CheckpointError(f"refused: the file makes an object of a {type(kind).__name__}")


def _may_set(target: Any) -> None:
    if type(target) is not OrderedDict and not isinstance(target, Inert):
        raise CheckpointError(f"refused: the file sets attributes of a {type(target).__name__}")


def _may_fill(target: Any, kind: type, keys: Sequence[Any] = ()) -> None:
    if type(target) not in (kind, OrderedDict if kind is dict else kind):
        raise CheckpointError(f"refused: the file puts items into a {type(target).__name__}")
    _may_hash(keys)


def _may_hash(keys: Sequence[Any]) -> None:
    for key in keys:
        parts, count = [key], 0
        while parts:
            part = parts.pop()
            if isinstance(part, tuple):
                count += len(part)
                if count > _KEY_LIMIT:
                    raise CheckpointError("refused: the file has a key of too many parts")
                parts += part


def _refuse(unpickler: _Unpickler) -> None:
    raise CheckpointError("refused: the file holds a step that torch.save never writes")


_GUARDS: dict[bytes, Callable[[_Unpickler], None]] = {
    pickle.REDUCE: lambda u: _may_call(u.stack[-2]),
    pickle.NEWOBJ: lambda u: _may_make(u.stack[-2]),
    pickle.NEWOBJ_EX: lambda u: _may_make(u.stack[-3]),
    pickle.BUILD: lambda u: _may_set(u.stack[-2]),
    pickle.APPEND: lambda u: _may_fill(u.stack[-2], list),
    pickle.APPENDS: lambda u: _may_fill(u.metastack[-1][-1], list),
    pickle.SETITEM: lambda u: _may_fill(u.stack[-3], dict, u.stack[-2:-1]),
    pickle.SETITEMS: lambda u: _may_fill(u.metastack[-1][-1], dict, u.stack[::2]),
    pickle.ADDITEMS: lambda u: _may_fill(u.metastack[-1][-1], set, u.stack),
    pickle.DICT: lambda u: _may_hash(u.stack[::2]),
    pickle.FROZENSET: lambda u: _may_hash(u.stack),
} | dict.fromkeys(
    (
        *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ),
    _refuse,
)


def _guarded(step: Callable[[Any], None], guard: Callable[[_Unpickler], None]) -> Any:
    def run(unpickler: _Unpickler) -> None:
        guard(unpickler)
        step(unpickler)

    return run


_Unpickler.dispatch = _STEPS | {
    code[0]: _guarded(_STEPS[code[0]], guard) for code, guard in _GUARDS.items()
}
