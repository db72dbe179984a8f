"""The two ends of a pipeline link: posted receives, and sends on their way."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from megads.parallel.collectives import Handle, recv_async, send_async
from megads.parallel.mesh import Neighbour


class Inbox:
    """Values that computations of this stage wait for, by (chunk, microbatch).

    They arrive through receives posted in advance, or directly from a chunk of the same stage.
    """

    def __init__(self, source: Neighbour | None, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._values: dict[tuple[int, int], tuple[Tensor, Handle]] = {}

    def post(self, key: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Start receiving the next message of the link, which is the value for `key`."""
        if self._source is None:
            raise ValueError(f"no link to receive {key} from")
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        self._values[key] = buffer, recv_async(buffer, self._source)

    def put(self, key: tuple[int, int], value: Tensor) -> None:
        """Deliver a value without a message."""
        self._values[key] = value, Handle()

    def take(self, key: tuple[int, int]) -> Tensor:
        """The value for `key`, once it has arrived."""
        value, handle = self._values.pop(key)
        handle.wait()
        return value


class Outbox:
    """Sends of one link. At most `window` of them are left on their way when `send` returns.

    A tensor stays alive only until its send has completed.
    """

    def __init__(self, target: Neighbour | None, window: int) -> None:
        self._target = target
        self._window = window
        self._under_way: deque[tuple[Handle, Tensor]] = deque()

    def send(self, value: Tensor) -> None:
        """Start sending `value`, which nobody may change any more."""
        if self._target is None:
            raise ValueError("no link to send to")
        value = value.contiguous()
        self._under_way.append((send_async(value, self._target), value))
        self._complete(self._window)

    def flush(self) -> None:
        """Wait until everything sent has been received."""
        self._complete(0)

    def _complete(self, leave: int) -> None:
        while len(self._under_way) > leave:
            handle, _ = self._under_way.popleft()
            handle.wait()
