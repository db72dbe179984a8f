"""Joining and leaving the default process group, in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from megads.errors import WorkerFailure
from megads.parallel.start import meet

CODE = """
import sys
from types import SimpleNamespace
import torch
from megads.launch.worker import leave
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from megads.parallel.start import start_process_group, stop_process_group

rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
place = SimpleNamespace(
    rank=rank, world_size=world, device="cpu", backend="gloo", init_method=f"file://{path}",
    job="test",
)
start_process_group(place, timeout_s=60)
mesh = Mesh.build(ParallelLayout(tp=world), rank)
if world > 1:
    total = torch.ones(5)
    torch.distributed.all_reduce(total, group=mesh.tp.group)
    assert total.tolist() == [world] * 5
print("done")
stop_process_group()
assert not torch.distributed.is_initialized()
leave(0)
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_meet_and_leave(tmp_path: Path, world_size: int) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(world_size), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        assert (worker.returncode, output) == (0, "done\n"), errors


def _place(port: int, rank: int, job: str = "job 1", world_size: int = 2) -> SimpleNamespace:
    where = f"tcp://127.0.0.1:{port}"
    return SimpleNamespace(rank=rank, world_size=world_size, init_method=where, job=job)


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_another_jobs_process_does_not_join(port: int) -> None:
    """Two jobs on one port: the one that has it goes on, the other's processes hear why not."""
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(meet, _place(port, 0), timeout_s=30)
        strangers = [_place(port, 1, job="job 2"), _place(port, 1, world_size=3)]
        for stranger in strangers:
            joined = pool.submit(meet, stranger, timeout_s=30)
            with pytest.raises(WorkerFailure, match=r"belongs to job 1 of 2 processes, this is ra"):
                joined.result(timeout=60)
        second = pool.submit(meet, _place(port, 1), timeout_s=30)
        for store in (first.result(timeout=60), second.result(timeout=60)):
            assert store.get("megads/job") == b"job 1 of 2 processes"


def test_two_processes_of_the_same_rank_are_noticed(port: int) -> None:
    """As when every task of a node starts a launcher for all of the node."""
    with ThreadPoolExecutor(4) as pool:
        places = [_place(port, 0), _place(port, 1), _place(port, 1)]
        joining = [pool.submit(meet, place, timeout_s=30) for place in places]
        failures = [future.exception(timeout=60) for future in joining]
    assert failures[0] is None
    (failure,) = (f for f in failures[1:] if f is not None)
    assert "job 1 of 2 processes: two processes came as rank 1" in str(failure)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(WorkerFailure, match=rf":{number}: another program uses this port; set"):
            meet(_place(number, 0), timeout_s=30)
