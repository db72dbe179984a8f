"""Joining and leaving the default process group, in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from megads.errors import HangError, WorkerFailure
from megads.parallel import start
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
    job="test", may_restart=False,
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


def _place(port: int, rank: int, **changes: Any) -> SimpleNamespace:
    values = {"world_size": 2, "job": "job 1", "backend": "gloo", "may_restart": False}
    where = {"rank": rank, "init_method": f"tcp://127.0.0.1:{port}"}
    return SimpleNamespace(**(where | values | changes))


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
        first.result(timeout=60).set("here", "one store")
        assert second.result(timeout=60).get("here") == b"one store"


def test_two_processes_of_the_same_rank_are_noticed(port: int) -> None:
    """As when every task of a node starts a launcher for all of the node."""
    with ThreadPoolExecutor(4) as pool:
        places = [_place(port, 0), _place(port, 1), _place(port, 1)]
        joining = [pool.submit(meet, place, timeout_s=30) for place in places]
        failures = [future.exception(timeout=60) for future in joining]
    assert failures[0] is None
    (failure,) = (f for f in failures[1:] if f is not None)
    assert "job 1 of 2 processes: two processes came as rank 1" in str(failure)


def test_a_machine_without_its_gpus_is_named(port: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(meet, _place(port, 0, backend="nccl"), timeout_s=3)
        with pytest.raises(WorkerFailure, match="would compute with gloo, rank 0 with nccl"):
            meet(_place(port, 1), timeout_s=30)


@pytest.fixture
def agents_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a store that outlives the processes that meet in it, as torchrun has one."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(*args: Any, **words: Any) -> Iterator[tuple[TCPStore, None, None]]:
        yield TCPStore("127.0.0.1", server.port, is_master=False), None, None

    monkeypatch.setattr(start, "rendezvous", client)
    yield server.port


def test_who_does_not_come_is_named(agents_store: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        places = [_place(agents_store, rank, world_size=4) for rank in (0, 2)]
        first, second = (pool.submit(meet, place, timeout_s=3) for place in places)
        with pytest.raises(HangError, match=r"ranks \[1, 3\] did not come in 3 s"):
            first.result(timeout=60)
        with pytest.raises(HangError, match=r"not all ranks came in 3 s"):
            second.result(timeout=60)


def test_processes_that_are_started_again_meet(agents_store: int) -> None:
    """Whatever the start before has left in the store, and in whatever order they come; in one of
    the starts only the first rank comes."""
    places = [_place(agents_store, rank, world_size=3, may_restart=True) for rank in range(3)]
    with ThreadPoolExecutor(4) as pool:
        for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
            if number == 2:
                alone = pool.submit(meet, places[0], timeout_s=0.5)
                assert isinstance(alone.exception(timeout=60), HangError)
            joining = []
            for rank in order:
                joining.append(pool.submit(meet, places[rank], timeout_s=30))
                time.sleep(0.3)
            stores = [future.result(timeout=60) for future in joining]
            assert not stores[0].check(["mine"])
            stores[0].set("mine", "")
            assert all(store.check(["mine"]) for store in stores)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(WorkerFailure, match=rf":{number}: another program uses this port; set"):
            meet(_place(number, 0), timeout_s=30)
