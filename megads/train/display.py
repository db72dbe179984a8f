"""What a person sees of a run: a line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from megads.train.sinks import Line


class Display(Protocol):
    """Where a person watches the run."""

    def step(self, values: Line, total_steps: int) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class LiveDisplay:
    """One line that is redrawn: steps done, loss, speed, time left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn(
                "step {task.completed}/{task.total}  {task.description}",
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )
        self._task: TaskID | None = None

    def step(self, values: Line, total_steps: int) -> None:
        step = int(values["step"] or 0)
        if self._task is None:
            self._task = self._progress.add_task("", total=total_steps, completed=step - 1)
            self._progress.start()
        self._progress.update(self._task, completed=step, description=_summary(values))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay:
    """A line per logged step, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seconds: list[float] = []

    def step(self, values: Line, total_steps: int) -> None:
        step = int(values["step"] or 0)
        self._seconds = [*self._seconds[-49:], float(values["step_time_s"] or 0.0)]
        remaining = (total_steps - step) * sorted(self._seconds)[len(self._seconds) // 2]
        self.note(f"step {step}/{total_steps}  {_summary(values)}  eta {_clock(remaining)}")

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


def _summary(values: Line) -> str:
    text = (
        f"loss {values['loss']:.4f}  grad norm {values['grad_norm']:.3f}  "
        f"lr {values['lr']:.3g}  {_count(float(values['tokens_per_second'] or 0))} tokens/s"
    )
    if values["mfu"] is not None:
        text += f"  mfu {values['mfu']:.1%}"
    return text + (f"  skipped {values['skipped']}" if values["skipped"] else "")


def _count(number: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def open_display() -> Display:
    """The one that suits standard output."""
    console = Console(file=sys.stdout)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(sys.stdout)
