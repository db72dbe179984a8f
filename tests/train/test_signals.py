"""Requests to stop that come at any moment: all ranks save the same step, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Workers
from tests.training import read_metrics, run_training, tiny_config, train_statuses, write_tokens

STEPS = 6
OPTIONS = [f"train.steps={STEPS}", f"optim.total={STEPS}", "checkpoint.every=3"]
LAYOUTS = ["dp2", "pp2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def straight(
    data: str, workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The lines of uninterrupted runs."""
    place = tmp_path_factory.mktemp("straight")
    return {
        layout: run_training(
            workers, tiny_config(place / layout, data, "gpt", *OPTIONS, f"parallel={layout}")
        )
        for layout in LAYOUTS
    }


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def signals_at(rank: int, moment: str) -> Callable[[], None]:
    """Have this process get signals at a moment of the run; returns how to undo that."""
    from megads.checkpoint import io
    from megads.train import loop

    build, train_step, write_blocks = loop.build, loop.train_step, io.write_blocks
    steps = itertools.count(1)
    fourth, writing = threading.Event(), threading.Event()

    def building(*args: Any) -> Any:
        if moment == "start" and rank == 1:
            send(signal.SIGUSR1)
        return build(*args)

    def stepping(*args: Any, **kwargs: Any) -> Any:
        step = next(steps)
        if moment == "save" and step == 4:
            fourth.set()
            assert writing.wait(60)
        result = train_step(*args, **kwargs)
        if moment == "step" and rank == 1 and step == 2:
            send(signal.SIGTERM)
        if moment == "again and again" and step >= 2:
            send(*[signal.SIGUSR1, signal.SIGTERM][:: 1 if rank else -1])
        return result

    def slowly_writing(*args: Any) -> Any:
        if moment == "save":
            assert fourth.wait(60)
            if rank == 1 or writing.is_set():  # the last save finds all asked again
                send(signal.SIGTERM)
        writing.set()
        time.sleep(0.2)  # training goes on meanwhile
        return write_blocks(*args)

    def put(*functions: Any) -> None:
        loop.build, loop.train_step, io.write_blocks = functions

    put(building, stepping, slowly_writing)
    return lambda: put(build, train_step, write_blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("moment", "saved"),
    [("start", 1), ("step", 3), ("again and again", 3), ("save", 5)],
)
def test_all_ranks_save_one_step_and_the_curve_goes_on(
    tmp_path: Path,
    data: str,
    workers: Workers,
    straight: dict[str, list[dict[str, Any]]],
    layout: str,
    moment: str,
    saved: int,
) -> None:
    config = tiny_config(tmp_path, data, "gpt", *OPTIONS, f"parallel={layout}")
    assert train_statuses(workers, config, signals_at, moment) == [3, 3]
    assert read_metrics(tmp_path)[-1]["step"] == saved
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == sorted({"step-3" if saved > 3 else f"step-{saved}", f"step-{saved}"})
    lines = run_training(workers, config)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "samples"):
        assert [line[name] for line in lines] == [line[name] for line in straight[layout]], name
