"""Counting what a machine has, on made-up file systems."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megads.launch.machine import core_count, free_memory, gpu_count, torch_has_cuda


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        (" 0 , 2", 2),
        ("0,-1,2", 1),
        ("0,4,2", 1),
        ("GPU-8932f937,GPU-7a1", 2),
        ("MIG-GPU-1/2/3", 1),
        ("NoDevFiles", 0),
    ],
)
def test_visible_gpus(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        _write(tmp_path / "dev" / name, "")
    assert gpu_count(visible, root=tmp_path) == count


def test_no_gpu_whatever_the_variable_says(tmp_path: Path) -> None:
    assert gpu_count(None, root=tmp_path) == gpu_count("0,1", root=tmp_path) == 0


def test_torch_build_is_recognised_without_importing_it() -> None:
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)


def test_torch_build_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "torch/__init__.py", "")
    _write(tmp_path / "torch/version.py", "cuda: Optional[str] = '12.8'\nhip = None\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_has_cuda()


def test_cores_follow_affinity_and_quota(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert core_count(root=tmp_path) == allowed
    _write(tmp_path / "proc/self/cgroup", "0::/job/task\n")
    _write(tmp_path / "sys/fs/cgroup/job/cpu.max", "50000 100000\n")
    _write(tmp_path / "sys/fs/cgroup/job/task/cpu.max", "max 100000\n")
    assert core_count(root=tmp_path) == 1


def test_memory_is_the_least_of_what_limits_leave(tmp_path: Path) -> None:
    assert free_memory(root=tmp_path) is None
    _write(tmp_path / "proc/meminfo", "MemTotal: 9999 kB\nMemAvailable:    8000 kB\n")
    assert free_memory(root=tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup/job"
    _write(tmp_path / "proc/self/cgroup", "0::/job/task\n")
    _write(group / "task/memory.max", "max\n")
    _write(group / "memory.max", "5000000\n")
    _write(group / "memory.current", "3000000\n")
    _write(group / "memory.stat", "anon 1\ninactive_file 1000000\n")
    assert free_memory(root=tmp_path) == 5_000_000 - (3_000_000 - 1_000_000)


def test_memory_limit_of_the_first_version_of_control_groups(tmp_path: Path) -> None:
    _write(tmp_path / "proc/meminfo", "MemAvailable: 8000 kB\n")
    _write(tmp_path / "proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    _write(group / "memory.limit_in_bytes", "1000\n")
    _write(group / "memory.usage_in_bytes", "400\n")
    assert free_memory(root=tmp_path) == 600
