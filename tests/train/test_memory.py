"""Nothing outlives its step: memory does not grow from one to the next."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.config.schema import Config
from megads.train.guard import Verdict
from tests import training
from tests.distributed import Workers
from tests.training import tiny_config, world_size, write_tokens


def count_tensors() -> tuple[int, int]:
    """(number, bytes) of the tensors that are alive; holds none of them afterwards."""
    # By type: asking a lazily imported module for its class would import it.
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(alive), sum(t.numel() * t.element_size() for t in alive)


def live_tensors(rank: int, world: int, config: Config, steps: int) -> list[tuple[int, int]]:
    """(live tensors, their bytes) after each step, with an overflow in every third one.

    The batches that are read ahead are there each time.
    """
    from megads.train import step
    from megads.train.build import build

    parts = build(config, training.pool_info(rank, world))
    counts, original = [], parts.guard.judge

    def judge(loss: float, norm: float) -> Verdict:
        return "nonfinite" if parts.state.step % 3 == 2 else original(loss, norm)

    parts.guard.judge = judge  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            step.train_step(parts)
            wait([batch for _, batch in parts.loader._ahead])  # type: ignore[union-attr]
            gc.collect()
            counts.append(count_tensors())
    finally:
        parts.loader.close()
        parts.metrics.close(0)
    parts.close()
    return counts


@pytest.mark.parametrize("layout", ["pp2", "dp2zero1"])
@pytest.mark.parametrize("accumulation", [2, 16])
def test_live_tensors_stay_the_same(
    tmp_path: Path, workers: Workers, layout: str, accumulation: int
) -> None:
    data = write_tokens(tmp_path / "tokens")
    batch = accumulation * (2 if "dp2" in layout else 1)
    options = [f"parallel={layout}", "train.micro_batch_size=1", f"train.global_batch_size={batch}"]
    config = tiny_config(tmp_path / "run", data, "gpt", *options, "train.nonfinite=skip")
    for counts in workers(2).run(live_tensors, config, 16, timeout=120):
        numbers = [number for number, _ in counts[3:]]
        assert max(numbers) - min(numbers) <= 2, "more than a thread that is about to let go holds"


def in_flight(rank: int, world: int, config: Config) -> int:
    from megads.train import step
    from megads.train.build import build

    parts = build(config, training.pool_info(rank, world))
    step.train_step(parts)
    parts.loader.close()
    parts.metrics.close(0)
    parts.close()
    return parts.executor.peak_in_flight


@pytest.mark.parametrize("microbatches", [1, 2, 3, 16])
def test_activations_in_flight_do_not_grow_with_microbatches(
    tmp_path: Path, workers: Workers, microbatches: int
) -> None:
    data = write_tokens(tmp_path / "tokens")
    for layout, stages in (("pp2", 2), ("pp4", 4)):
        config = tiny_config(
            tmp_path / layout,
            data,
            "gpt",
            f"parallel={layout}",
            "train.micro_batch_size=1",
            f"train.global_batch_size={microbatches}",
        )
        peaks = workers(world_size(config)).run(in_flight, config)
        assert peaks == [min(microbatches, stages - s) for s in range(stages)]


def kept_losses(rank: int) -> Callable[[], None]:
    """The fault: every step's losses are kept with their graphs."""
    from megads.pipeline import executor

    original = executor._Walk.forward
    kept: list[Any] = []

    def forward(self: Any, key: Any) -> None:
        original(self, key)
        kept.append(self.in_flight.get(key))

    executor._Walk.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        executor._Walk.forward = original  # type: ignore[method-assign]
        kept.clear()

    return undo


def live_tensors_with_fault(rank: int, world: int, config: Config) -> list[tuple[int, int]]:
    undo = kept_losses(rank)
    try:
        return live_tensors(rank, world, config, 8)
    finally:
        undo()


def test_negative_control_kept_graphs_are_noticed(tmp_path: Path, workers: Workers) -> None:
    data = write_tokens(tmp_path / "tokens")
    options = ["parallel=pp2", "train.micro_batch_size=1", "train.global_batch_size=2"]
    config = tiny_config(tmp_path / "run", data, "gpt", *options, "train.nonfinite=skip")
    counts = workers(2).run(live_tensors_with_fault, config)
    assert any(numbers[-1][0] - numbers[3][0] > 4 for numbers in counts)


def resident_bytes(rank: int, world: int, config: Config, steps: int, leak: int) -> list[int]:
    """Resident memory of this process after each step; `leak` bytes are lost in each."""
    from megads.train import step
    from megads.train.build import build

    parts = build(config, training.pool_info(rank, world))
    after, lost = [], []
    for _ in range(steps):
        step.train_step(parts)
        lost.append(b"x" * leak)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        after.append(pages * os.sysconf("SC_PAGE_SIZE"))
    parts.loader.close()
    parts.metrics.close(0)
    parts.close()
    return after


@pytest.mark.parametrize(
    ("stage", "steps", "lost"), [(1, 100, 0), (3, 100, 0), (3, 30, 10 * 2**20)]
)
def test_resident_memory_does_not_grow_with_offload(
    tmp_path: Path, workers: Workers, stage: int, steps: int, lost: int
) -> None:
    """From step 20 to the last by less than 1 %; more than that when 10 MiB are lost on the way."""
    data = write_tokens(tmp_path / "tokens")
    options = [f"parallel.zero={stage}", "parallel.offload=nvme", "parallel.bucket_mb=0.01"]
    config = tiny_config(tmp_path / "run", data, "gpt", "parallel.dp=1", *options)
    leak = lost // (steps - 20)
    (after,) = workers(1).run(resident_bytes, config, steps, leak, timeout=120)
    assert (after[-1] - after[19] < 0.01 * after[19]) is (lost == 0)
