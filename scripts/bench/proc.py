"""What Linux tells about processes: CPU use of the machine and of a job, and peak memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def machine_cpu_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    user, nice, system, _, _, irq, softirq = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / TICKS


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command name: state, parent, ...; None when it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def family(root: int) -> list[int]:
    """Process ids of `root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds used by these processes and by the children that they have waited for."""
    stats = [fields for pid in pids if (fields := _stat(pid)) is not None]
    return sum(int(ticks) for fields in stats for ticks in fields[11:15]) / TICKS


def memory_mb(pid: int, field: str) -> float:
    """A size of /proc/PID/status in MiB, like VmRSS or VmHWM (peak); 0 when the process is gone."""
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def reset_peak(pid: int) -> None:
    """Set the peak (VmHWM) of a process back to what it holds now."""
    try:
        (PROC / str(pid) / "clear_refs").write_text("5")
    except OSError:
        pass


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process, if it still runs."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_until_quiet(limit_cores: float, max_wait_s: float) -> float:
    """Wait until other programs use less than `limit_cores`; return what they used last."""
    deadline = time.monotonic() + max_wait_s
    while True:
        before = machine_cpu_seconds()
        time.sleep(2)
        used = (machine_cpu_seconds() - before) / 2
        if used < limit_cores or time.monotonic() > deadline:
            return used
