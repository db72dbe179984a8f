"""What wandb and TensorBoard cost a run, with and without a network, beside a run without them.

    python scripts/bench/loggers.py --rounds 5 --steps 300 --out loggers.json [SETTING...]

Whole runs of megads-train on the demo model, one of each kind in every round, in turn, so that a
slow minute of the machine is everybody's. Seconds per step are those between two lines of
metrics.jsonl, seen from outside: from the first line to the last one, which includes that a logger
starts, and from a third of the steps on. The CPU seconds of all of the job's processes beside them
are what a busy machine disturbs least. Each run is compared with that without loggers in its round,
and the median of these ratios counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import proc

Times = dict[str, list[dict[str, float]]]
POLL_S = 0.02
DEMO = ["model=gpt-tiny", "parallel=tp2pp2", "eval.every=0", "checkpoint.save_last=false"]
BOTH = "logging.loggers=[wandb,tensorboard]"
KINDS: dict[str, list[str]] = {
    "none": [],
    "offline": [BOTH, "logging.wandb_mode=offline"],
    "server silent, auto": [BOTH, "logging.wandb_mode=auto"],
    "server silent, online": [BOTH, "logging.wandb_mode=online"],
}
"""With `auto` the run is offline after three seconds; with `online` wandb goes on trying."""


class Moment(NamedTuple):
    """When a run had so many lines, and the CPU seconds its processes had used."""

    lines: int
    at: float
    cpu: float


def seconds_per_step(words: Sequence[str], steps: int, server: str) -> dict[str, float]:
    """One run, with its loggers' start and after it; raises if it does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "run/metrics.jsonl")
        command = [sys.executable, "-m", "megads.cli.train", *DEMO, f"run.dir={folder}/run"]
        command += [f"train.steps={steps}", "logging.every=1", *words]
        environment = os.environ | {"WANDB_BASE_URL": server, "WANDB_API_KEY": "0" * 40}
        seen: list[Moment] = []
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    count = lines.read_bytes().count(b"\n") if lines.exists() else 0
                    if len(seen) < 3 and count >= (1, steps / 3, steps)[len(seen)]:
                        cpu = proc.cpu_seconds(proc.family(process.pid))
                        seen.append(Moment(count, time.perf_counter(), cpu))
                    time.sleep(POLL_S)
            finally:
                for pid in proc.family(process.pid) if process.poll() is None else ():
                    proc.kill(pid)
        if process.returncode or len(seen) < 3:
            raise RuntimeError(Path(folder, "log").read_text()[-2000:])
    first, third, last = seen
    return {
        "all": (last.at - first.at) / (last.lines - first.lines),
        "later": (last.at - third.at) / (last.lines - third.lines),
        "cpu": (last.cpu - first.cpu) / (last.lines - first.lines),
        "cpu later": (last.cpu - third.cpu) / (last.lines - third.lines),
    }


def measure(rounds: int, steps: int, words: Sequence[str]) -> Times:
    """Seconds per step of every kind in every round."""
    times: Times = {kind: [] for kind in KINDS}
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for number in range(rounds):
            order = [*KINDS][number % len(KINDS) :] + [*KINDS][: number % len(KINDS)]
            for kind in order:
                times[kind].append(seconds_per_step([*KINDS[kind], *words], steps, server))
                shown = "  ".join(f"{name} {s:.4f}" for name, s in times[kind][-1].items())
                print(f"round {number + 1}  {kind:22} {shown}", flush=True)
    return times


def ratios(times: Times, window: str) -> dict[str, float]:
    """Median over the rounds of each kind's time to that of a run without loggers."""
    none = [seconds[window] for seconds in times["none"]]
    return {
        kind: statistics.median(s[window] / n for s, n in zip(values, none, strict=True))
        for kind, values in times.items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="more settings, as for megads-train")
    options = parser.parse_args()
    times = measure(options.rounds, options.steps, options.words)
    result = {window: ratios(times, window) for window in ("all", "later", "cpu", "cpu later")}
    for kind in KINDS:
        seconds = statistics.median(s["later"] for s in times[kind])
        shares = "  ".join(f"{window} {ratio[kind]:.4f}" for window, ratio in result.items())
        print(f"{kind:22} {seconds:.4f} s/step; to none: {shares}")
    if options.out:
        facts = {"cores": os.cpu_count(), "steps": options.steps, "ratio": result}
        options.out.write_text(json.dumps({**facts, "s_per_step": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
