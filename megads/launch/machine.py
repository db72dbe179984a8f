"""What this machine has: GPUs, CPU cores, free memory. Answers without importing torch.

Every function takes the root of the file system it looks at, so that tests can show it another
machine. Linux tells these things in files; elsewhere the answers are "no GPU" and "unknown".
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Machine:
    """Resources that processes started here may use; `free_bytes` None when unknown."""

    gpus: int
    cores: int
    free_bytes: int | None


def gpu_count(visible: str | None, *, root: Path = ROOT) -> int:
    """NVIDIA GPUs that this process may use.

    `visible` is the value of CUDA_VISIBLE_DEVICES, None when unset. As in CUDA itself, its list
    ends at the first entry that is no device, and an empty one hides all of them.
    """
    present = sum(
        re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*")
    )
    if visible is None or present == 0:
        return present
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        named = entry.startswith(("GPU-", "MIG-"))
        if not named and not (entry.isdecimal() and int(entry) < present):
            break
        count += 1
    return count


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def core_count(*, root: Path = ROOT) -> int:
    """CPU cores this process may use: its affinity, less if its control group has a quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _control_groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def free_memory(*, root: Path = ROOT) -> int | None:
    """Bytes of memory that new processes can still take, or None when unknown.

    The kernel's estimate (MemAvailable) or what the limits of the control groups leave, whichever
    is less. Cached file pages count as free: they go when the memory is needed.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    candidates = [int(found.group(1)) * 1024] if found else []
    for group in _control_groups(root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
            if limit.isdecimal() and usage.isdecimal():
                cached = re.search(
                    r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE
                )
                used = int(usage) - (int(cached.group(1)) if cached else 0)
                candidates.append(max(0, int(limit) - used))
    return min(candidates, default=None)


def _control_groups(root: Path) -> list[Path]:
    """Directories of this process's control groups and their parents, version 1 and 2."""
    groups: list[Path] = []
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        base = mount / controllers if controllers else mount
        here = base / path.lstrip("/")
        groups.extend(p for p in (here, *here.parents) if p == base or base in p.parents)
    return list(dict.fromkeys([*groups, mount, mount / "memory"]))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
