"""What a run reports: metrics.jsonl always, a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

import torch
from rich.console import Console
from rich.progress import (
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

Value = float | int | bool | str | None


class Display(Protocol):
    """Where a person watches the run."""

    def step(self, values: Mapping[str, Value], total_steps: int) -> None: ...

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

    def step(self, values: Mapping[str, Value], total_steps: int) -> None:
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

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seconds: list[float] = []

    def step(self, values: Mapping[str, Value], total_steps: int) -> None:
        step = int(values["step"] or 0)
        self._seconds = [*self._seconds[-49:], float(values["step_time_s"] or 0.0)]
        remaining = (total_steps - step) * sorted(self._seconds)[len(self._seconds) // 2]
        self.note(f"step {step}/{total_steps}  {_summary(values)}  eta {_clock(remaining)}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


def _summary(values: Mapping[str, Value]) -> str:
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


class Metrics:
    """Writes on one rank; silent on the others, which may call everything all the same."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._display: Display | None = None
        if writes:
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
            console = Console(file=sys.stdout)
            self._display = LiveDisplay(console) if console.is_terminal else PlainDisplay(console)

    def rewind(self, step: int) -> None:
        """The run goes on from `step`: lines of later steps move to metrics.superseded.jsonl.

        They were written between the checkpoint and a crash, and those steps are made again.
        """
        if self._file is None:
            return
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        late = [line for line in lines if not _is_up_to(line, step)]
        if not late:
            return
        with self._path.with_name("metrics.superseded.jsonl").open("a", encoding="utf-8") as old:
            old.writelines(late)
        temporary = self._path.with_name("metrics.jsonl.tmp")
        kept = "".join(line for line in lines if _is_up_to(line, step))
        temporary.write_text(kept, encoding="utf-8")
        self._file.close()
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def step(self, values: Mapping[str, Value], total_steps: int) -> None:
        """Record one training step."""
        self._write(values)
        if self._display is not None:
            with contextlib.suppress(BrokenPipeError):
                self._display.step(values, total_steps)

    def evaluation(
        self, step: int, val_loss: float, by_source: Mapping[str, float] | None = None
    ) -> None:
        """Record a validation loss, and that of each source if there are several.

        Perplexity is the exponential of the loss.
        """
        perplexity = math.inf if val_loss >= 700 else math.exp(val_loss)
        values: dict[str, Value | dict[str, float]] = {
            "step": step,
            "val_loss": val_loss,
            "val_ppl": perplexity,
        }
        text = f"validation at step {step}: loss {val_loss:.4f}  perplexity {perplexity:.2f}"
        if by_source is not None and len(by_source) > 1:
            values["val_loss_by_source"] = dict(by_source)
            text += "".join(f"  {name} {loss:.4f}" for name, loss in by_source.items())
        self._write(values)
        self.note(text)

    def note(self, text: str) -> None:
        """Tell whoever watches; nobody may be left, and training goes on."""
        if self._display is not None:
            with contextlib.suppress(BrokenPipeError):
                self._display.note(text)

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()

    def _write(self, values: Mapping[str, Value | dict[str, float]]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _is_up_to(line: str, step: int) -> bool:
    """Whether a line is of `step` or before; one that a failing disk spoiled is not."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed run did not finish writing."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


def device_name(device: torch.device) -> str:
    """The marketing name of a GPU; "cpu" otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
