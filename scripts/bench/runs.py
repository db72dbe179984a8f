"""One measured run of one contender, and what is known about it afterwards."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import proc

CORES = len(os.sched_getaffinity(0))
POLL_S = 0.01
CLEAN_CORES = 0.10
"""A step counts while other programs use less than this many of the cores that the run needs."""


@dataclass
class Run:
    """Times in seconds, sizes in MiB; lists of times start with the warmup steps.

    `peak_mb` is each worker's peak over its whole life, `step_peak_mb` its peak from the first step
    on: peers reset the mark themselves once the model is built, for megads it is reset from outside
    when config.yaml appears, which it writes between building and the first step.
    `seen_step_s` is the time between two lines of metrics.jsonl as seen from outside,
    `reported_peak_mb` what metrics.jsonl says.
    """

    row: str
    dtype: str
    contender: str
    repeat: int
    world: int
    command: list[str]
    eager: bool = field(kw_only=True)
    wait_foreign: float = field(kw_only=True)
    rc: int | None = None
    problem: str = ""
    wall_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    step_peak_mb: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    seen_step_s: list[float] = field(default_factory=list)
    reported_peak_mb: float | None = None

    def clean_steps(self, warmup: int) -> list[float]:
        """Times of the steps after `warmup` that other programs left alone."""
        spare = max(0, CORES - self.world * max(1, CORES // self.world))
        timed = list(zip(self.step_s, self.foreign, strict=True))[warmup:]
        return [seconds for seconds, foreign in timed if foreign <= CLEAN_CORES + spare]

    def check(self, steps: int, vocab: int) -> None:
        """Set `problem` when the run did not do the work it was asked for."""
        if self.problem:
            return
        if len(self.step_s) != steps:
            self.problem = f"reported {len(self.step_s)} of {steps} steps (exit status {self.rc})"
        elif not all(map(math.isfinite, self.loss)) or abs(self.loss[0] - math.log(vocab)) > 0.5:
            self.problem = f"loss {self.loss} does not begin near ln {vocab}"


def start_and_wait(
    run: Run, env: dict[str, str], cwd: Path, timeout_s: float, watch: Callable[[int], None]
) -> None:
    """Run the command to its end, calling `watch(pid)` all the while; output goes to cwd/log."""
    began = time.monotonic()
    with (cwd / "log").open("w") as log:
        process = subprocess.Popen(run.command, env=env, cwd=cwd, stdout=log, stderr=log)
        try:
            while (rc := process.poll()) is None and time.monotonic() - began < timeout_s:
                watch(process.pid)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                for pid in proc.family(process.pid):  # workers may sit in sessions of their own
                    proc.send(pid, signal.SIGKILL)
                process.wait()
    run.rc, run.wall_s = rc, time.monotonic() - began
    if rc is None:
        run.problem = f"still running after {timeout_s:.0f} s"


def run_peer(run: Run, env: dict[str, str], cwd: Path, report: Path, timeout_s: float) -> None:
    """Measure a peer by its own report, which counts even if the process then dies at exit."""
    start_and_wait(run, env, cwd, timeout_s, lambda pid: None)
    if not report.exists():
        run.problem = run.problem or f"no report: {(cwd / 'log').read_text()[-1500:]}"
        return
    result = json.loads(report.read_text())
    run.step_s, run.foreign, run.loss = result["step_s"], result["foreign_core"], result["loss"]
    run.step_peak_mb, run.peak_mb = result["step_peak_rss_mb"], result["peak_rss_mb"]


class Watcher:
    """Follows metrics.jsonl of a megads run and the memory and CPU use of its processes."""

    def __init__(self, run: Run, run_dir: Path) -> None:
        self._run = run
        self._config = run_dir / "config.yaml"
        self._metrics = run_dir / "metrics.jsonl"
        self._workers: list[int] = []
        self._early_peaks: list[float] = []
        self._size = self._lines = 0
        self._time = time.perf_counter()
        self._machine, self._own = proc.machine_cpu_seconds(), 0.0

    def __call__(self, root: int) -> None:
        """Look once; `root` is the process that was started."""
        if not self._workers and self._config.exists():
            self._find_workers(root)
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        if size != self._size:
            self._size = size
            lines = self._metrics.read_bytes().count(b"\n")
            self._mark(root, lines - self._lines)
            self._lines = lines

    def _mark(self, root: int, new_lines: int) -> None:
        """Charge the time since the last mark to the steps that ended within it."""
        now, machine = time.perf_counter(), proc.machine_cpu_seconds()
        pids = proc.family(root)
        own = proc.cpu_seconds(pids)
        elapsed = now - self._time
        foreign = max(0.0, (machine - self._machine) - (own - self._own)) / elapsed
        self._run.foreign += [round(foreign, 3)] * new_lines
        self._run.seen_step_s += [elapsed / max(1, new_lines)] * new_lines
        self._time, self._machine, self._own = now, machine, own
        self._measure_memory()

    def _find_workers(self, root: int) -> None:
        """The largest processes are the workers; note their peaks so far and reset the marks."""
        by_size = sorted(proc.family(root), key=lambda pid: proc.memory_mb(pid, "VmRSS"))
        self._workers = sorted(by_size[-self._run.world :])
        self._early_peaks = [proc.memory_mb(pid, "VmHWM") for pid in self._workers]
        for pid in self._workers:
            proc.reset_peak(pid)

    def _measure_memory(self) -> None:
        """Read every worker's peak, unless one is gone already."""
        peaks = [proc.memory_mb(pid, "VmHWM") for pid in self._workers]
        if all(peaks):
            self._run.step_peak_mb = [round(peak, 1) for peak in peaks]
            self._run.peak_mb = [
                round(max(pair), 1) for pair in zip(peaks, self._early_peaks, strict=True)
            ]


def run_megads(
    run: Run, env: dict[str, str], cwd: Path, run_dir: Path, timeout_s: float, step_tokens: int
) -> None:
    """Measure megads-train by its metrics.jsonl; `step_tokens` is what each step must consume."""
    metrics = run_dir / "metrics.jsonl"
    start_and_wait(run, env, cwd, timeout_s, Watcher(run, run_dir))
    if run.rc != 0:
        run.problem = run.problem or f"exit status {run.rc}: {(cwd / 'log').read_text()[-1500:]}"
    if not metrics.exists():
        run.problem = run.problem or "no metrics.jsonl"
        return
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    run.step_s = [line["step_time_s"] for line in lines]
    run.loss = [line["loss"] for line in lines]
    run.foreign += [float(CORES)] * (len(lines) - len(run.foreign))
    run.reported_peak_mb = max(line["peak_memory_bytes"] for line in lines) / 2**20
    if any(line["tokens"] != step_tokens * (i + 1) for i, line in enumerate(lines)):
        run.problem = run.problem or f"a step is not {step_tokens} tokens"
