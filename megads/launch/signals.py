"""Requests to stop, from a scheduler or a user, that the training loop looks at between steps."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Set by SIGTERM or SIGUSR1 while it is entered, or by the clock; read by the training loop.

        with StopRequest() as stop:
            while not stop.requested:
                ...

    The handler only remembers the signal: saving needs collectives, and those have their place
    between two steps. Later signals change nothing. Enter one before anything slow is imported,
    since until then these signals end the process; one entered inside it knows what came earlier.
    Only the main thread may enter it. `deadline`: when time is up, in seconds since the epoch.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._has_come = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
            outer = getattr(self._before[number], "__self__", None)
            if isinstance(outer, StopRequest) and outer._has_come:
                self._has_come = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def requested(self) -> bool:
        """Whether a signal to stop has arrived in this process, or its time is up."""
        is_late = self._deadline is not None and time.time() >= self._deadline
        return self._has_come or is_late

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
