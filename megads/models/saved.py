"""What forward passes keep for backward passes: counted, and moved to the host, if wanted."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megads.parallel.ledger import Ledger

Tables = Callable[[], Iterable[Tensor]]
Fetched = tuple[Tensor, torch.cuda.Event | None]
"""A tensor on the device, and what its readers have to wait for."""
Context = AbstractContextManager[object]

FETCHED_AHEAD = 8
"""Tensors on their way back from the host while the backward pass is busy with a later one."""


class SavedTensors:
    """Sees what autograd saves between the forward and the backward passes of a rank.

    `counts`: keep book of the bytes, in `device` and `host`. A storage counts once, however many
    tensors of it are saved. `offloads`: what blocks save waits on the host, in pinned memory where
    there is a GPU; it is copied there while the forward pass goes on, and back ahead of its use.
    Lasting memory, of parameters and of tables, is neither counted nor moved; `tables` is asked
    anew each time, for they are made when they are first needed.
    """

    def __init__(self, *, counts: bool = False, offloads: bool = False) -> None:
        self.device, self.host = Ledger(), Ledger()
        self.counts, self._offloads = counts, offloads
        self._uses: dict[int, int] = {}
        self._lane = _Lane()

    def of_pass(self, parameters: Iterable[Tensor], tables: Tables) -> Context:
        """Count what is saved meanwhile, if that is asked for."""
        if not self.counts:
            return contextlib.nullcontext()
        return _hooks(parameters, tables, self._stay)

    def of_blocks(self, parameters: Iterable[Tensor], tables: Tables, shared: Tables) -> Context:
        """Move what is saved meanwhile to the host, if that is asked for, but not what is `shared`:
        read by all blocks of the pass, and asked for anew each time."""
        if not self._offloads:
            return contextlib.nullcontext()
        before: _OnHost | None = None

        def move(tensor: Tensor) -> _Saved:
            nonlocal before
            if any(_storage(tensor) == _storage(other) for other in shared()):
                return self._stay(tensor)
            before = _OnHost(tensor, before, self._lane, self.host)
            return before

        return _hooks(parameters, tables, move)

    def _stay(self, tensor: Tensor) -> _Saved:
        return _OnDevice(tensor, self._uses, self.device) if self.counts else tensor


def _hooks(
    parameters: Iterable[Tensor], tables: Tables, pack: Callable[[Tensor], _Saved]
) -> Context:
    lasting = {_storage(tensor) for tensor in parameters}

    def pack_unless_lasting(tensor: Tensor) -> _Saved:
        key = _storage(tensor)
        lasts = key in lasting or any(key == _storage(table) for table in tables())
        return tensor if lasts else pack(tensor)

    def unpack(saved: _Saved) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.take()

    return saved_tensors_hooks(pack_unless_lasting, unpack)


def _storage(tensor: Tensor) -> int:
    """Tells storages apart that live at the same time, wherever their memory is meanwhile."""
    return int(tensor.untyped_storage()._cdata)


class _OnDevice:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: Tensor, uses: dict[int, int], ledger: Ledger) -> None:
        self._tensor, self._uses, self._ledger = tensor, uses, ledger
        self._key, self._nbytes = _storage(tensor), tensor.untyped_storage().nbytes()
        uses[self._key] = uses.get(self._key, 0) + 1
        if uses[self._key] == 1:
            ledger.add(self._nbytes)

    def take(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._uses[self._key] -= 1
        if not self._uses[self._key]:
            del self._uses[self._key]
            self._ledger.add(-self._nbytes)


class _Lane:
    """A stream of its own for copies beside the passes; on a CPU copies are just made."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        # Contiguous, whatever the tensor is a view of: else the copy goes through other memory.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given to others before it is copied
        return host

    def to_device(
        self, host: Tensor, device: torch.device
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        if device.type != "cuda":
            return host, None
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            tensor = host.to(device, non_blocking=True)
            return tensor, stream.record_event()


class _OnHost:
    """A saved tensor that waits on the host. `before`: the one that will be needed after it."""

    def __init__(self, tensor: Tensor, before: _OnHost | None, lane: _Lane, ledger: Ledger) -> None:
        self._device, self._lane, self._ledger = tensor.device, lane, ledger
        self._before = weakref.ref(before) if before is not None else None
        self._host = lane.to_host(tensor)
        self._fetched: Fetched | None = None
        ledger.add(self._host.nbytes)

    def take(self) -> Tensor:
        tensor, event = self._fetch()
        saved: _OnHost | None = self
        for _ in range(FETCHED_AHEAD):
            saved = saved._before() if saved is not None and saved._before is not None else None
            if saved is not None:
                saved._fetch()
        if event is not None:
            reader = torch.cuda.current_stream(self._device)
            reader.wait_event(event)
            tensor.record_stream(reader)
        return tensor

    def _fetch(self) -> Fetched:
        if self._fetched is None:
            self._fetched = self._lane.to_device(self._host, self._device)
        return self._fetched

    def __del__(self) -> None:
        self._ledger.add(-self._host.nbytes)


_Saved = Tensor | _OnDevice | _OnHost
