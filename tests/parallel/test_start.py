"""Joining and leaving the default process group, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    rank=rank, world_size=world, device="cpu", backend="gloo", init_method=f"file://{path}"
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
