"""What wandb and TensorBoard cost a run, with and without a network, beside a run without them.

    python scripts/bench/loggers.py --launches 4 --rounds 6 --out loggers.json [SETTING...]

One run of megads-train of each kind on the demo model, all at the same time, but taking turns: all
processes of all others are stopped while one goes on for some seconds. So what the machine does
from minute to minute happens to everybody. Seconds per step are those between lines of
metrics.jsonl, seen from outside, after the loggers have started; with them are the CPU seconds of
all of the run's processes. Each turn is compared with that of the run without loggers in the same
round. A run keeps the memory that it happened to get, which is worth some per cent: all are
launched several times, each time in another order, and of the launches' medians the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import proc

POLL_S = 0.005
STARTED = 40
"""Lines after which a run has started its loggers, or has given up waiting for a server."""
DEMO = ["model=gpt-tiny", "parallel=tp2pp2", "eval.every=0", "checkpoint.save_last=false"]
BOTH = "logging.loggers=[wandb,tensorboard]"
KINDS: dict[str, list[str]] = {
    "none": [],
    "offline": [BOTH, "logging.wandb_mode=offline"],
    "server silent, auto": [BOTH, "logging.wandb_mode=auto"],
    "server silent, online": [BOTH, "logging.wandb_mode=online"],
}
"""With `auto` the run is offline after three seconds; with `online` wandb goes on trying."""


class Turn(NamedTuple):
    """What one step took in a turn: seconds, and CPU seconds of all processes."""

    seconds: float
    cpu: float


class Job:
    """A run that only goes on when it is its turn."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def send(self, number: signal.Signals) -> None:
        """To all processes of the run."""
        for pid in proc.family(self._process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def lines(self) -> int:
        """How many steps have been logged; raises if the run has ended."""
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text()[-2000:])
        path = self._folder / "run/metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def turn(self, seconds: float) -> Turn:
        """Go on for so long. The step in which it was stopped does not count."""
        self.send(signal.SIGCONT)
        try:
            begun, end = self.lines(), time.perf_counter() + seconds
            first = last = None
            while time.perf_counter() < end:
                count = self.lines()
                if count > (last[0] if last else begun):
                    cpu = proc.cpu_seconds(proc.family(self._process.pid))
                    last = (count, time.perf_counter(), cpu)
                    first = first or last
                time.sleep(POLL_S)
        finally:
            self.send(signal.SIGSTOP)
        if first is None or last is None or last[0] == first[0]:
            raise RuntimeError("no two steps in a turn; make it longer")
        steps = last[0] - first[0]
        return Turn((last[1] - first[1]) / steps, (last[2] - first[2]) / steps)


@contextmanager
def started(words: list[str], server: str) -> Iterator[Job]:
    """A run that has started its loggers and is stopped; killed in the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "megads.cli.train", *DEMO, f"run.dir={folder}/run"]
        command += ["train.steps=1000000", "logging.every=1", *words]
        environment = os.environ | {"WANDB_BASE_URL": server, "WANDB_API_KEY": "0" * 40}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        job = Job(process, folder)
        try:
            while job.lines() < STARTED:
                time.sleep(POLL_S)
            job.send(signal.SIGSTOP)
            yield job
        finally:
            job.send(signal.SIGKILL)
            process.wait()


def measure(first: int, rounds: int, seconds: float, words: list[str]) -> dict[str, list[Turn]]:
    """The turns of every kind after one launch, in every round in another order.

    `first`: number of the kind that is launched first.
    """
    turns: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        jobs = {
            kind: stack.enter_context(started([*KINDS[kind], *words], server))
            for kind in _kinds_from(first)
        }
        for number in range(rounds):
            for kind in _kinds_from(number):
                turns[kind].append(jobs[kind].turn(seconds))
    return turns


def _kinds_from(number: int) -> list[str]:
    cut = number % len(KINDS)
    return [*KINDS][cut:] + [*KINDS][:cut]


def ratios(turns: dict[str, list[Turn]]) -> dict[str, Turn]:
    """Median over the rounds of each kind's time and CPU time to those without loggers."""
    return {
        kind: _median([Turn(*map(truediv, turn, none)) for turn, none in pairs])
        for kind, pairs in ((k, zip(v, turns["none"], strict=True)) for k, v in turns.items())
    }


def _median(turns: list[Turn]) -> Turn:
    return Turn(*(statistics.median(values) for values in zip(*turns, strict=True)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="after each launch")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="more settings, as for megads-train")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    launches = []
    for number in range(options.launches):
        launches.append(measure(number, options.rounds, options.seconds, options.words))
        shown = (f"{kind} {turn.seconds:.4f}" for kind, turn in ratios(launches[-1]).items())
        print(f"launch {number + 1}, to none: ", "  ".join(shown), flush=True)
    each = [ratios(turns) for turns in launches]
    result = {kind: _median([ratio[kind] for ratio in each]) for kind in KINDS}
    for kind, ratio in result.items():
        seconds = _median([turn for turns in launches for turn in turns[kind]]).seconds
        print(f"{kind:22} {seconds:.4f} s/step; to none {ratio.seconds:.4f}, CPU {ratio.cpu:.4f}")
    if options.out:
        facts = {
            "cores": os.cpu_count(),
            "seconds": options.seconds,
            "ratio": {kind: ratio._asdict() for kind, ratio in result.items()},
            "launches": [
                {kind: [turn._asdict() for turn in values] for kind, values in turns.items()}
                for turns in launches
            ],
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
