"""Jobs on a real SLURM, as a user sees them: their state, their files, their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts/slurm/train.sbatch")
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
}


def command(directory: Path, *words: str) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(
        words, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.2)


@dataclass(frozen=True)
class Job:
    """A job that was submitted in `directory`, whose run is in `directory/run_dir`."""

    number: str
    directory: Path
    run_dir: str

    @classmethod
    def submit(cls, directory: Path, run_dir: str, *words: str) -> Job:
        """Submit with sbatch; `words` are its options, the script and the script's arguments."""
        number = command(directory, "sbatch", "--parsable", *words, f"run.dir={run_dir}")
        return cls(number, directory, run_dir)

    @property
    def output(self) -> str:
        files = [
            *self.directory.glob(f"*-{self.number}.out"),
            *self.directory.glob(f"{self.run_dir}/*-{self.number}.out"),
        ]
        return "\n".join(file.read_text() for file in files)

    @property
    def records(self) -> list[dict[str, object]]:
        """The lines of metrics.jsonl that are complete."""
        file = self.directory / self.run_dir / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def losses(self) -> list[tuple[object, object, object]]:
        return [(r["step"], r["loss"], r["grad_norm"]) for r in self.records]

    @property
    def processes(self) -> list[int]:
        """Those of the run, wherever they are."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().split(b"\0")
                here = os.readlink(file.with_name("cwd")) == str(self.directory)
            except OSError:
                continue
            if here and f"run.dir={self.run_dir}".encode() in words:
                found.append(int(file.parent.name))
        return found

    def field(self, name: str) -> str:
        text = command(self.directory, "scontrol", "show", "job", self.number)
        found = re.search(rf"\b{name}=(\S+)", text)
        return found.group(1) if found else ""

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def restarts(self) -> int:
        return int(self.field("Restarts"))

    def signal(self, *options: str) -> None:
        command(self.directory, "scancel", *options, self.number)

    def reaches(self, step: int) -> None:
        def there() -> bool:
            assert self.state in ("PENDING", "RUNNING", "COMPLETING"), self.output
            return any(record["step"] == step for record in self.records)

        until(there, f"job {self.number} is at step {step}")

    def ends(self, state: str = "COMPLETED") -> None:
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        until(lambda: self.state in final, f"job {self.number} ends")
        assert self.state == state, self.output

    def is_requeued(self, times: int) -> None:
        until(lambda: self.restarts == times, f"job {self.number} is requeued")
