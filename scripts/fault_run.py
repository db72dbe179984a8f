"""One training run in which one rank does something bad; see fault_test.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kill_run import COMPARED, WORDS, Wrong, curve, state_and_parent
from megads.checkpoint.directory import committed_steps, step_path
from megads.checkpoint.reader import verify
from megads.config.layout_name import parse_layout_name
from megads.launch.activity import LINE_BYTES
from megads.parallel.layout import ParallelLayout

VARIABLE = "MEGADS_FAULT"
FAULTS = Path(__file__).resolve().parent / "faults"
STEPS = 12
START_LIMIT_S, ORPHAN_LIMIT_S = 240.0, 1.0
AGENT_S = 40.0
"""Torch's agent lets ranks that do not leave try it for 30 s, and takes seconds to end itself."""
Way = Literal["ends", "recovers", "torchrun"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what the job says of it, and whether the rank can leave its stacks.

    `words`: what the report begins with; for a fault of the start-up it may be another rank's.
    """

    words: str
    leaves_stacks: bool = True
    named: str = r"\brank {rank} (failed with exit status|was ended by)"
    ways: tuple[Way, ...] = ("ends", "recovers", "torchrun")
    in_start: bool = True
    """Whether it may happen while the run is built, not in a step."""


GAVE_UP = r"(no progress for|Traceback|.*cannot be reached)"
KINDS = {
    "raise": Kind(r"Traceback[^\0]*ValueError: an injected fault"),
    "exit": Kind("the process ended, with status 0, before", leaves_stacks=False),
    "kill": Kind("rank {rank} was ended by SIGKILL", leaves_stacks=False),
    "segfault": Kind("rank {rank} was ended by SIGSEGV"),
    "hang": Kind("no progress for"),
    "starve": Kind(r"no progress for \d+ s in step {step}, data;", in_start=False),
    "spin": Kind("rank {rank} failed with exit status 1 and did not say why"),
    "stop": Kind("the process was stopped"),
    "stuck disk": Kind(GAVE_UP, named=r"\brank {rank} did not leave", in_start=False),
    "kill supervisor": Kind(
        "the process that watches over the workers was ended by SIGKILL",
        leaves_stacks=False,
        named="",
        ways=("ends", "recovers"),
    ),
}

SPEAKING = ("raise", "hang", "starve")
"""Kinds in which the rank itself can say what happened."""


@dataclass(frozen=True)
class Fault:
    """What one rank does, and when; as scripts/faults/sitecustomize.py reads it."""

    kind: str
    rank: int
    step: int
    place: int


@dataclass
class Round:
    """A run in `path` with one fault; `curve` is that of the same run without it.

    `way`: whether it may be started again, and by what.
    """

    path: Path
    layout: str
    words: list[str]
    fault: Fault
    way: Way
    limit_s: float
    curve: list[tuple[object, ...]]

    @property
    def world(self) -> int:
        return layout_of(self.layout).world_size

    @property
    def marker(self) -> Path:
        return self.path / "fault"

    @property
    def text(self) -> str:
        return (self.path / "log.txt").read_text(errors="replace")

    @property
    def failures(self) -> list[Path]:
        return sorted(self.path.glob("failures/*"))

    def run(self) -> float:
        """Seconds from the fault to the end of the job, or of its first start where it recovers.

        Raises Wrong, after killing all that is left.
        """
        self.path.mkdir(parents=True)
        try:
            process = self.start()
            fault = self.wait_for_fault(process)
            seconds = self.wait_for_end(process, fault)
            self.check_nothing_is_left()
            self.check(process.returncode)
        except Wrong as error:
            raise Wrong(f"{self.path}: {error}") from error
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return seconds

    def start(self) -> subprocess.Popen[bytes]:
        command = ["-m", "megads.cli.train", f"run.dir={self.path}", *self.words]
        command += [f"launch.timeout_s={self.limit_s}"]
        command += [f"launch.max_restarts={int(self.way == 'recovers')}"]
        if self.way == "torchrun":
            agent = ["-m", "torch.distributed.run", "--standalone"]
            command = [*agent, f"--nproc-per-node={self.world}", *command]
        path = os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")])
        what = json.dumps({**asdict(self.fault), "marker": str(self.marker)})
        environment = {**os.environ, "PYTHONPATH": path, VARIABLE: what, "OMP_NUM_THREADS": "1"}
        with (self.path / "log.txt").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=environment
            )

    def wait_for_fault(self, process: subprocess.Popen[bytes]) -> float:
        """When the fault happened, in seconds since the epoch."""
        _until(lambda: self.marker.exists() or process.poll() is not None, START_LIMIT_S)
        if not self.marker.exists():
            raise Wrong(f"no fault before it ended with {process.poll()}: {self.text[-2000:]}")
        _until(lambda: self.marker.read_text() != "", 1.0)
        return float(self.marker.read_text())

    def wait_for_end(self, process: subprocess.Popen[bytes], fault: float) -> float:
        allowed_s = self.limit_s + (AGENT_S if self.way == "torchrun" else 0.0)
        ended = (lambda: bool(self.failures)) if self.way == "recovers" else lambda: False
        _until(lambda: process.poll() is not None or ended(), fault + allowed_s - time.time())
        seconds = time.time() - fault
        if process.poll() is None and not ended():
            raise Wrong(f"still running {seconds:.1f} s after the fault: {self.text[-2000:]}")
        _until(lambda: process.poll() is not None, START_LIMIT_S)
        if process.poll() is None:
            raise Wrong(f"did not recover: {self.text[-2000:]}")
        return seconds

    def processes(self) -> list[int]:
        """What still runs of this job: they all have its variable."""
        mark, found = str(self.marker).encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if state_and_parent(pid)[0] != "Z"]

    def check_nothing_is_left(self) -> None:
        _until(lambda: not self.processes(), ORPHAN_LIMIT_S)
        if left := self.processes():
            raise Wrong(f"processes {left} are still there: {self.text[-2000:]}")

    def check(self, status: int) -> None:
        """What the run left behind, after its end with `status`."""
        for step in committed_steps(self.path / "checkpoints"):
            verify(step_path(self.path / "checkpoints", step))
        if (status == 0) != (self.way == "recovers"):
            raise Wrong(f"ended with {status}: {self.text[-2000:]}")
        if self.way == "recovers" and curve(self.path) != self.curve:
            raise Wrong(f"another {', '.join(COMPARED)} than without the fault")
        if self.way == "torchrun":
            self.check_first_word()
            files = [self.path / "ranks" / f"rank-{rank}.txt" for rank in range(self.world)]
        else:
            self.check_report()
            if len(self.failures) != 1:
                raise Wrong(f"kept {len(self.failures)} failures")
            files = [self.failures[0] / f"rank-{rank}.txt" for rank in range(self.world)]
        self.check_ranks(files)

    def check_report(self) -> None:
        """The rank with the fault comes first and is named."""
        report = self.text.partition("megads-train: ")[2]
        kind, values = KINDS[self.fault.kind], asdict(self.fault)
        words = GAVE_UP if self.fault.step == 0 and self.fault.kind == "hang" else kind.words
        if not re.match(words.format(**values), report):
            raise Wrong(f"does not begin with {words!r}: {report[:2000]}")
        first = re.search(r"\brank \d+ .*", report)
        named = kind.named if self.fault.step or not kind.named else r"\brank {rank}\b"
        if first is None or not re.search(named.format(**values), first[0]):
            raise Wrong(f"the rank is not named: {report[:4000]}")

    def check_first_word(self) -> None:
        """Without our launcher the rank says itself what happened, if it still can."""
        first = re.search(r"megads-train: rank (\d+): ", self.text)
        if self.fault.kind in SPEAKING and (first is None or int(first[1]) != self.fault.rank):
            raise Wrong(f"the rank does not speak first: {self.text[:4000]}")

    def check_ranks(self, files: list[Path]) -> None:
        """Every rank's last action is there, and stacks of all that could write them."""
        for rank, file in enumerate(files):
            text = file.read_text() if file.exists() else ""
            found = re.match(
                rf"rank {rank} \(process \d+ on \S+\), step +(\d+), since .+: \S", text
            )
            if found is None or abs(int(found[1]) - self.fault.step) > 1:
                raise Wrong(f"{file}: not the last action of step {self.fault.step}: {text[:500]}")
            if 'File "' not in text[LINE_BYTES:] and not self.may_lack_stacks(rank):
                raise Wrong(f"{file} has no stacks")

    def may_lack_stacks(self, rank: int) -> bool:
        """Whether the rank, or with the supervisor every rank, was gone too soon to write them.

        Nobody but our launcher wakes a rank that was stopped.
        """
        silent = not KINDS[self.fault.kind].leaves_stacks
        silent |= self.fault.kind == "stop" and self.way == "torchrun"
        return silent and (rank == self.fault.rank or self.fault.kind == "kill supervisor")


def layout_of(name: str) -> ParallelLayout:
    """The sizes that a layout's name stands for."""
    sizes = parse_layout_name(name)
    return ParallelLayout(**{axis: sizes.get(axis, 1) for axis in ("tp", "pp", "dp")})


def uninterrupted(path: Path, words: list[str]) -> list[tuple[object, ...]]:
    """The curve of a run without a fault."""
    command = [sys.executable, "-m", "megads.cli.train", f"run.dir={path}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S)
    if done.returncode:
        raise Wrong(f"the uninterrupted run failed: {done.stderr[-2000:]}")
    return curve(path)


def settings(data: str, layout: str) -> list[str]:
    """The words of every run but what is its own."""
    return [*WORDS, f"train.steps={STEPS}", f"data.paths=[{data}]", f"parallel={layout}"]


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    """Return when the condition holds or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
