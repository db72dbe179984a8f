"""The worker pools themselves: results, failures, hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.distributed import RemoteFailure, mesh_for


def _pid_and_sum(rank: int, world_size: int, value: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value * rank)
    dist.all_reduce(tensor)
    return os.getpid(), int(tensor)


def _raise_on_one(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def _sleep_on_one(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def _die(rank: int, world_size: int) -> None:
    os._exit(7)


def _same_mesh(rank: int, world_size: int) -> tuple[bool, int, int]:
    from megads.parallel.layout import ParallelLayout

    layout = ParallelLayout(tp=2, pp=1, dp=1)
    mesh = mesh_for(layout, rank)
    return mesh_for(layout, rank) is mesh, mesh.tp.size, mesh.tp.index


def test_results_come_back_in_rank_order_from_processes_that_stay(workers) -> None:
    first = workers(2).run(_pid_and_sum, 10)
    second = workers(2).run(_pid_and_sum, 20)
    assert [total for _, total in first] == [10, 10]
    assert [total for _, total in second] == [20, 20]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_between_calls_a_pool_stands_still(workers) -> None:
    pids = [pid for pid, _ in workers(2).run(_pid_and_sum, 10)]
    deadline = time.monotonic() + 60
    while [_state(pid) for pid in pids] != ["T", "T"]:
        assert time.monotonic() < deadline, "the workers are still running"
        time.sleep(0.01)
    assert [pid for pid, _ in workers(2).run(_pid_and_sum, 10)] == pids


def test_mesh_is_made_once_per_worker(workers) -> None:
    assert workers(2).run(_same_mesh) == [(True, 2, 0), (True, 2, 1)]


def test_failure_shows_the_traceback_and_where_the_others_were(workers) -> None:
    with pytest.raises(RemoteFailure) as failure:
        workers(2).run(_raise_on_one)
    text = str(failure.value)
    assert "ValueError: rank one gives up" in text
    assert "rank 0 was still in" in text and "_raise_on_one" in text
    assert [total for _, total in workers(2).run(_pid_and_sum, 1)] == [1, 1]


def test_hang_is_a_failure_with_the_stack(workers) -> None:
    start = time.monotonic()
    with pytest.raises(RemoteFailure, match="did not finish within 1 s") as failure:
        workers(2).run(_sleep_on_one, timeout=1.0)
    assert time.monotonic() - start < 60
    assert "in _sleep_on_one" in str(failure.value)


def test_death_of_a_rank_is_reported(workers) -> None:
    with pytest.raises(RemoteFailure, match="died with status 7"):
        workers(2).run(_die)
