"""A request to stop is heard during an evaluation, which is then made when the run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megads.config.schema import Config
from megads.data.loader import TokenLoader
from tests.distributed import Workers
from tests.training import read_metrics, tiny_config, train_statuses, write_tokens

WORDS = [
    "train.steps=4",
    "eval.every=2",
    "eval.steps=4",
    "data.valid_fraction=0.4",
    "checkpoint.save_last=true",
]


def signal_during_evaluation(rank: int, step: int, signalled: int) -> Callable[[], None]:
    """Have one rank get a signal when it reads the second batch of the evaluation at `step`."""
    original, batches = TokenLoader.evaluation_batches, iter(range(1000))
    number = 1 if step == 2 else 5

    def reading(self: TokenLoader, *args: Any, **options: Any) -> Any:
        if next(batches) == number and rank == signalled:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, *args, **options)

    TokenLoader.evaluation_batches = reading  # type: ignore[method-assign]

    def undo() -> None:
        TokenLoader.evaluation_batches = original  # type: ignore[method-assign]

    return undo


def values(config: Config, name: str) -> list[tuple[int, float]]:
    lines = read_metrics(Path(config.run.dir))
    return [(line["step"], line[name]) for line in lines if name in line]


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_signal_to_one_rank(tmp_path: Path, workers: Workers, layout: str) -> None:
    data = write_tokens(tmp_path / "tokens", documents=60)
    words = [*WORDS, f"parallel={layout}"]
    straight = tiny_config(tmp_path / "straight", data, "gpt", *words)
    assert train_statuses(workers, straight) == [0, 0]
    want = {name: values(straight, name) for name in ("loss", "grad_norm", "val_loss")}
    assert [step for step, _ in want["val_loss"]] == [2, 4]

    config = tiny_config(tmp_path / "stopped", data, "gpt", *words)
    assert train_statuses(workers, config, signal_during_evaluation, 2, 1) == [3, 3]
    assert values(config, "loss") == want["loss"][:2] and values(config, "val_loss") == []
    # The missing evaluation comes first, and the last one is stopped as well.
    assert train_statuses(workers, config, signal_during_evaluation, 4, 0) == [3, 3]
    assert values(config, "loss") == want["loss"]
    assert values(config, "val_loss") == want["val_loss"][:1]
    assert train_statuses(workers, config) == [0, 0]
    assert {name: values(config, name) for name in want} == want
    assert train_statuses(workers, config) == [0, 0]  # nothing is left to do
    assert values(config, "val_loss") == want["val_loss"]
    steps = sorted(path.name for path in (tmp_path / "stopped/checkpoints").glob("step-*"))
    assert steps == ["step-2", "step-4"]


def test_stopped_before_anything_was_recorded(tmp_path: Path, workers: Workers) -> None:
    """The evaluation that is missing is made, but not that of a run that was only loaded from."""
    data = write_tokens(tmp_path / "tokens", documents=60)
    words = [*WORDS, "logging.every=100"]
    config = tiny_config(tmp_path / "stopped", data, "gpt", *words)
    assert train_statuses(workers, config, signal_during_evaluation, 2, 0) == [3]
    assert read_metrics(tmp_path / "stopped") == []
    load = f"checkpoint.load={tmp_path}/stopped"
    other = tiny_config(tmp_path / "other", data, "gpt", *words, load)
    assert train_statuses(workers, other) == train_statuses(workers, config) == [0]
    assert [step for step, _ in values(other, "val_loss")] == [4]
    assert [step for step, _ in values(config, "val_loss")] == [2, 4]
