"""Progress of `megads-preprocess` on standard error: a bar on a terminal, else a line at times."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from megads.data.preprocess import Progress

_LINE_SECONDS = 10.0


class ProgressDisplay:
    """Called with each `Progress`; a context manager, so that the bar is gone at the end."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Bar | None = None
        self._printed = time.monotonic()
        if console.is_terminal:
            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __call__(self, progress: Progress) -> None:
        if self._bar is not None:
            total = None if progress.fraction is None else 1.0
            self._bar.update(
                self._task, description=line(progress), completed=progress.fraction, total=total
            )
        elif time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            print(line(progress), file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def line(progress: Progress) -> str:
    """For example `1200 documents, 240/s, 3.1 MB/s, 40 %, 0:01:10 left`."""
    parts = [
        f"{progress.documents} documents",
        f"{progress.documents_per_second:.0f}/s",
        f"{progress.bytes_per_second / 1e6:.1f} MB/s",
    ]
    if progress.fraction is not None:
        parts.append(f"{progress.fraction:.0%}")
    if progress.seconds_left is not None:
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
    return ", ".join(parts)
