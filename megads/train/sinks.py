"""Where the numbers of a run go: files of lines, TensorBoard, and whatever else takes lines."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

Line = Mapping[str, Any]
"""One line of metrics.jsonl, by name: numbers, None, lists and mappings of such. All have `step`;
a training step also what the display shows of it."""
Tell = Callable[[str], None]
"""Takes a note for whoever watches; from any thread."""

CAPACITY = 4096
"""Lines that wait for a tracker; what comes when there are so many is dropped."""
CLOSE_S = 5.0
"""How long the end of a run waits for its trackers."""
FLUSH_S = 10
"""Seconds for which TensorBoard keeps what it was given before it is on the disk."""


class Sink(Protocol):
    """Takes the lines of a run."""

    def rewind(self, step: int, made: int) -> None:
        """The run begins or goes on after `step`. There are lines up to step `made`; those of steps
        after `step` are void, for these are made again. Comes before the first line."""

    def record(self, line: Line) -> None:
        """Take a line, whose step is that of the line before or a later one."""

    def close(self, status: int) -> None:
        """The run ends with this exit status."""


class JsonLines:
    """A file with a JSON object a line; those that a rewind makes void move to another file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    @property
    def made(self) -> int:
        """The step of the last line; 0 if there is none."""
        steps = (_step_of(line) for line in reversed(self._lines()))
        return int(next((step for step in steps if math.isfinite(step)), 0))

    def rewind(self, step: int, made: int) -> None:
        """Lines of later steps, and spoiled ones, move to NAME.superseded.jsonl.

        They were written between the checkpoint and a crash, and those steps are made again.
        """
        lines = self._lines()
        late = [line for line in lines if _step_of(line) > step]
        if not late:
            return
        with self._path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as old:
            old.writelines(late)
        temporary = self._path.with_suffix(".jsonl.tmp")
        kept = "".join(line for line in lines if _step_of(line) <= step)
        temporary.write_text(kept, encoding="utf-8")
        self._file.close()
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def record(self, line: Line) -> None:
        """Write a line; it is in the file when this returns."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def lacks(self, step: int, name: str) -> bool:
        """Whether no line of this step has `name`."""
        found = (json.loads(line) for line in self._lines() if _step_of(line) == step)
        return not any(name in line for line in found)

    def close(self, status: int) -> None:
        self._file.close()

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


class TensorBoard:
    """Scalars in TensorBoard's event files, by the names of metrics.jsonl."""

    def __init__(self, directory: Path, config: str) -> None:
        """`config`: the configuration, to be read there."""
        self._directory, self._config = directory, config
        self._writer: Any = None

    def rewind(self, step: int, made: int) -> None:
        """Open a file; its first record hides later steps that earlier files may have."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        has_files = self._directory.is_dir() and any(self._directory.iterdir())
        self._writer = SummaryWriter(
            str(self._directory), purge_step=step + 1 if has_files else None, flush_secs=FLUSH_S
        )
        indented = self._config.replace("\n", "\n    ")
        self._writer.add_text("config", f"    {indented}", step)

    def record(self, line: Line) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One record for all: add_scalar makes one of each, in a tenfold of the time.
        values = numbers(line)
        step = int(values.pop("step"))
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=scalars), step)

    def close(self, status: int) -> None:
        if self._writer is not None:
            self._writer.close()


class Background:
    """A sink that a thread of its own makes and feeds, so that nothing it does holds up the run.

    The thread starts with the first call. A sink that fails ends with a note; one that is too slow,
    or hangs, loses lines, which is told of once. `tell` must not wait.
    """

    def __init__(self, name: str, make: Callable[[], Sink], tell: Tell) -> None:
        self._name, self._make, self._tell = name, make, tell
        self._jobs: queue.SimpleQueue[Callable[[Sink], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._status = 0
        self._dropped = 0

    def rewind(self, step: int, made: int) -> None:
        """As of the sink; returns at once."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(lambda sink: sink.rewind(step, made))

    def record(self, line: Line) -> None:
        """As of the sink; returns at once. Left out when too many lines wait already."""
        if self._jobs.qsize() < CAPACITY:
            self._jobs.put(lambda sink: sink.record(line))
        elif self._thread.is_alive():
            if not self._dropped:
                self._tell(f"{self._name} is too slow: lines are left out; metrics.jsonl has them")
            self._dropped += 1

    def end(self, status: int) -> None:
        """The run ends with this exit status: nothing is recorded any more. Returns at once."""
        self._status = status
        self._jobs.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the sink is closed, or until `deadline` on the monotonic clock."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(
                f"{self._name} does not come to an end and is left behind; metrics.jsonl has "
                f"every line"
            )
        elif self._dropped:
            self._tell(f"{self._name} was too slow for {self._dropped} lines; see metrics.jsonl")

    def _work(self) -> None:
        try:
            sink = self._make()
            while (job := self._jobs.get()) is not None:
                job(sink)
            sink.close(self._status)
        except BaseException as error:  # a thread's last words, whatever they are
            self._tell(
                f"{self._name} has failed and gets nothing more; metrics.jsonl has every line. "
                f"{type(error).__name__}: {error}"
            )


def numbers(line: Line) -> dict[str, float]:
    """The numbers of a line by flat names such as `phases_s/forward` and `times_s/0`; what is None
    or text is left out."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, list | tuple):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": number for name, number in numbers(value).items()}
        elif isinstance(value, bool | int | float):
            flat[key] = value
    return flat


def _step_of(line: str) -> float:
    """The step of a line of JSON; infinite for one that a failing disk spoiled."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed run did not finish writing."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
