"""What a run reports: metrics.jsonl and the display always, trackers such as wandb if wanted."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megads.config.decode import to_yaml
from megads.config.schema import Config
from megads.train.display import Display, open_display
from megads.train.sinks import CLOSE_S, Background, JsonLines, Line, Sink, TensorBoard
from megads.train.state import TrainState
from megads.train.wandb_run import WandbRun


class Metrics:
    """Writes on one rank; silent on the others, which may call everything all the same.

    `directory` is run.dir, or None on a rank that is silent. `trackers` get every line too; what
    they and others put into `notes`, from whatever thread, is shown with the next line.
    """

    def __init__(
        self,
        directory: Path | None,
        trackers: Sequence[Background] = (),
        notes: queue.SimpleQueue[str] | None = None,
    ) -> None:
        self._lines = JsonLines(directory / "metrics.jsonl") if directory is not None else None
        self._display: Display | None = open_display() if directory is not None else None
        self._trackers, self._notes = trackers, notes or queue.SimpleQueue()

    @classmethod
    def of_run(cls, config: Config, state: TrainState) -> Metrics:
        """Of the rank that writes, with the trackers of logging.loggers.

        The run's id is read when the first step is about to be made, after a resume.
        """
        directory, notes = Path(config.run.dir), queue.SimpleQueue[str]()

        def wandb() -> Sink:
            return WandbRun(config, state.run_id, notes.put)

        def tensorboard() -> Sink:
            return TensorBoard(directory / "tensorboard", to_yaml(config))

        makers: dict[str, Callable[[], Sink]] = {"wandb": wandb, "tensorboard": tensorboard}
        wanted = [name for name in makers if name in config.logging.loggers]
        trackers = [Background(name, makers[name], notes.put) for name in wanted]
        return cls(directory, trackers, notes)

    def rewind(self, step: int) -> None:
        """The run begins or goes on after `step`: what was recorded of later steps is void, for
        they are made again. Comes before the first step."""
        if self._lines is None:
            return
        made = self._lines.made
        for sink in self._sinks():
            sink.rewind(step, made)

    def step(self, line: Line, total_steps: int) -> None:
        """Record one training step."""
        self._record(line)
        if self._display is not None:
            with contextlib.suppress(OSError):
                self._display.step(line, total_steps)

    def evaluation(
        self, step: int, val_loss: float, by_source: Mapping[str, float] | None = None
    ) -> None:
        """Record a validation loss, and that of each source if there are several."""
        ppl = perplexity(val_loss)
        line: dict[str, object] = {"step": step, "val_loss": val_loss, "val_ppl": ppl}
        text = f"validation at step {step}: loss {val_loss:.4f}  perplexity {ppl:.2f}"
        if by_source is not None and len(by_source) > 1:
            line["val_loss_by_source"] = dict(by_source)
            line["val_ppl_by_source"] = {n: perplexity(loss) for n, loss in by_source.items()}
            for name, loss in by_source.items():
                text += f"\n  {name}: loss {loss:.4f}  perplexity {perplexity(loss):.2f}"
        self._record(line)
        self.note(text)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether no validation loss is recorded of this step. On a silent rank, False."""
        return self._lines is not None and self._lines.lacks(step, "val_loss")

    def note(self, text: str) -> None:
        """Tell whoever watches; nobody may be left, and training goes on."""
        if self._display is not None:
            with contextlib.suppress(OSError):  # a pipe without a reader, a terminal that is gone
                self._display.note(text)

    def close(self, status: int) -> None:
        """The run ends with this exit status. Waits CLOSE_S for the trackers, all together."""
        deadline = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.end(status)
        for tracker in self._trackers:
            tracker.join(deadline)
        self._show_notes()
        if self._display is not None:
            with contextlib.suppress(OSError):
                self._display.close()
        if self._lines is not None:
            self._lines.close(status)

    def _record(self, line: Line) -> None:
        for sink in self._sinks():
            sink.record(line)
        self._show_notes()

    def _sinks(self) -> Sequence[Sink | Background]:
        return () if self._lines is None else (self._lines, *self._trackers)

    def _show_notes(self) -> None:
        while not self._notes.empty():
            self.note(self._notes.get())


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats; infinite where that is no number."""
    return math.inf if loss >= 700 else math.exp(loss)
