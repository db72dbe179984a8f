"""Ranks as threads, so that a save by many ranks is a cheap test in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megads.checkpoint import exchange
from megads.checkpoint.writer import SaveMeta
from megads.config.model import ModelConfig
from megads.parallel.mesh import Axis

MODEL = ModelConfig(
    name="t",
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    vocab_size=101,
    vocab_multiple=8,
    max_seq_length=16,
    activation="swiglu",
)
META: SaveMeta = {"model": MODEL, "layout": {"tp": 1, "pp": 1, "dp": 1}}


def simulate(world_size: int, fn: Callable[[Axis], Any]) -> list[Any]:
    """Run `fn(world axis)` on every rank; results, or the exceptions raised, in rank order.

    A rank that stays away from an exchange breaks it for the others after five seconds.
    """
    slots: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def gather(obj: Any, axis: Axis) -> list[Any]:
        slots[axis.index] = obj
        barrier.wait(5)
        out = list(slots)
        barrier.wait(5)
        return out

    def run(index: int) -> Any:
        try:
            return fn(Axis("world", world_size, index, tuple(range(world_size))))
        except Exception as error:
            return error

    real = exchange.all_gather_object
    exchange.all_gather_object = gather
    try:
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(run, range(world_size)))
    finally:
        exchange.all_gather_object = real
