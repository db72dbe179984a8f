"""A thread of every worker that ends it when it hangs, and tells where it was when it had to go."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable

from megads.launch.activity import Activity

OWN_SHARE = 0.5
"""Share of `launch.timeout_s` that a rank's own work may take without any progress."""
WAITING_SHARE = 0.8
"""Share that a rank waits for others. It is more, so that the rank that hangs is the first to fail;
what is left is for the others to leave."""
LEAVING_SHARE = 0.1
"""Share that the other ranks get to leave once one has failed, if it is not longer than GRACE_S."""
GRACE_S = 5.0

OnHang = Callable[[str], None]
"""Ends the process; told what it was doing."""


class Watchdog:
    """Looks at an `Activity` every `interval_s` while it is entered.

    When the rank's own work makes no progress for `limit_s`, the stacks of all threads are written
    and `on_hang` is called; a process that cannot even run this thread is ended a little later. On
    a signal the stacks are written too: it may come because another rank has failed, and the main
    thread may be waiting where no handler of its own can run. A crash, or an error that ends what
    is inside, leaves its traceback in the same file. Only the main thread may enter it.
    """

    def __init__(
        self, activity: Activity, limit_s: float, on_hang: OnHang, *, interval_s: float = 0.5
    ) -> None:
        self._activity, self._limit_s, self._on_hang = activity, limit_s, on_hang
        self._interval_s = min(interval_s, limit_s / 4)
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stopped = False

    def __enter__(self) -> Watchdog:
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._activity.catch_crashes()
        self._look()  # the thread may never get to run
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._activity.append("".join(traceback.format_exception(error)).rstrip())
        signal.set_wakeup_fd(self._before)
        self._stopped = True
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._activity.close()

    def _watch(self) -> None:
        while not self._stopped:
            ready, _, _ = select.select([self._reader], [], [], self._interval_s)
            for number in os.read(self._reader, 64) if ready else b"":
                if number:
                    self._activity.dump(f"on {signal.Signals(number).name}")
            if not self._stopped:
                self._look()

    def _look(self) -> None:
        activity = self._activity
        activity.refresh()
        idle_s = time.monotonic() - activity.since if activity.is_own else 0.0
        if idle_s < self._limit_s:
            later_s = min(4 * self._interval_s, self._limit_s / 2)
            activity.end_after(self._limit_s - idle_s + later_s)
            return
        message = (
            f"no progress for {idle_s:.0f} s in step {activity.step}, {activity.what}; the stack "
            f"of every thread is in the rank's file. Raise launch.timeout_s if this may take so "
            f"long: the limit is {OWN_SHARE} of it"
        )
        activity.dump("as it makes no progress")
        self._on_hang(message)
