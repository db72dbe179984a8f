"""One training run that is killed, damaged and started again; see kill_test.py."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megads.checkpoint.directory import committed_steps, step_path
from megads.checkpoint.reader import verify
from megads.errors import CheckpointError

KEEP = 3
START_LIMIT_S, END_LIMIT_S = 180.0, 60.0
FILE_LIMIT = 100 << 10
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
WORDS = [
    "model.num_layers=4",
    "model.hidden_size=48",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=96",
    "model.vocab_size=101",
    "model.max_seq_length=16",
    "model.hidden_dropout=0.1",
    "train.seq_length=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=12",
    "parallel.offload_budget_mb=0.05",
    "checkpoint.every=1",
    f"checkpoint.keep={KEEP}",
    "logging.every=1",
    "eval.every=0",
    "launch.threads=1",
]


def state_and_parent(pid: int) -> tuple[str, int]:
    """Of a process, as the system shows it; one that is gone looks like one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z", 0
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)


class Wrong(Exception):
    """Something that must never happen."""


@dataclass
class Run:
    """One training run in `path`, started again and again until it has finished."""

    path: Path
    words: list[str]
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    expected: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / f"log-{self.starts}.txt"

    def start(self, file_limit: int | None = None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        command = [sys.executable, "-m", "megads.cli.train", f"run.dir={self.path}", *self.words]

        def limit() -> None:
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=limit)

    def processes(self) -> list[int]:
        """The workers and what watches over them: everything below the launcher."""
        assert self.process is not None
        below: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            state, parent = state_and_parent(int(entry.name))
            if state != "Z":
                below.setdefault(parent, []).append(int(entry.name))
        found = list(below.get(self.process.pid, []))
        for pid in found:  # grows meanwhile
            found += below.get(pid, [])
        return found

    def has_stepped(self) -> bool:
        return re.search(r"^step \d+/", self.text(), re.MULTILINE) is not None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_steps(self) -> None:
        """Return once this start has made a step, or has ended."""
        assert self.process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while self.process.poll() is None and not self.has_stepped():
            if time.monotonic() > deadline:
                raise Wrong(f"no step within {START_LIMIT_S} s")
            time.sleep(0.02)

    def kill(self, *, everything: bool, draw: random.Random) -> None:
        """SIGKILL one process of the job, or the launcher and all; return when all are gone."""
        assert self.process is not None
        job = self.processes()
        for pid in [draw.choice(job)] if job and not everything else [self.process.pid, *job]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        deadline = time.monotonic() + END_LIMIT_S
        while any(state_and_parent(pid)[0] != "Z" for pid in job):
            if time.monotonic() > deadline:
                raise Wrong(f"processes {job} are still there")
            time.sleep(0.02)

    def wait(self, limit_s: float = END_LIMIT_S) -> int:
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Wrong(f"still running after {limit_s} s") from None

    def whole(self) -> list[int]:
        """Steps of the checkpoints that are committed and whole."""
        good = []
        for step in committed_steps(self.checkpoints):
            with contextlib.suppress(CheckpointError):
                verify(step_path(self.checkpoints, step))
                good.append(step)
        return good

    def check_start(self) -> None:
        """The last start must have loaded the newest checkpoint that was whole before it."""
        found = re.search(r"loaded \S+: step (\d+)", self.text())
        start = int(found[1]) if found else None
        if (found or self.has_stepped()) and start != self.expected:
            raise Wrong(f"started from step {start}, not from step {self.expected}")

    def look_ahead(self) -> None:
        """Remember what the next start must load. There must always be something once saved."""
        good = self.whole()
        if self.expected is not None and not good:
            raise Wrong("no checkpoint is whole any more")
        self.expected = good[-1] if good else None


def curve(path: Path) -> list[tuple[object, ...]]:
    """Everything of metrics.jsonl that must not depend on what happened."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[name] for name in COMPARED) for line in lines]


def damage(run: Run, draw: random.Random, *, flip: bool) -> str | None:
    """Spoil a file of one of the newest checkpoints, if another whole one is left."""
    good = run.whole()
    if len(good) < 2:
        return None
    step = draw.choice(good[-2:]) if len(good) > 2 else good[-1]
    file = draw.choice(sorted(step_path(run.checkpoints, step).iterdir()))
    size = file.stat().st_size
    at = draw.randrange(size)
    if flip:
        with file.open("r+b") as data:
            data.seek(at)
            byte = data.read(1)[0]
            data.seek(at)
            data.write(bytes([byte ^ (1 << draw.randrange(8))]))
    else:
        os.truncate(file, at)
    return f"{'flipped a bit' if flip else 'truncated'} at {at} of {step}/{file.name}"


def without_space(run: Run, mounted: Path | None) -> str:
    """Start where the next checkpoint finds no room; the run must end and say why."""
    if mounted is None:
        run.start(FILE_LIMIT)
        status = run.wait(START_LIMIT_S)
    else:
        filler = mounted / "filler"
        sizes = [f.stat().st_size for f in run.checkpoints.glob("step-*/*")] or [1 << 20]
        system = os.statvfs(mounted)
        with filler.open("wb") as file:
            free = system.f_bavail * system.f_frsize
            file.write(bytes(max(0, free - max(sizes) // 2 - (64 << 10))))
        run.start()
        try:
            status = run.wait(START_LIMIT_S)
        finally:
            filler.unlink()
    text = run.text()
    if status == 0:
        return "finished all the same"
    if not re.search(r"No space left|File too large|GB is free", text):
        raise Wrong(f"ended with {status} but does not say why")
    named = re.search(r"saving step \d+: .*?rank \d+: cannot write [^;]*", text)
    return f"status {status}: {named[0][-110:] if named else text.strip().splitlines()[-1][-110:]}"
