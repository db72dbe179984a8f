"""What wandb and TensorBoard cost a run, with and without a network, beside the run without them.

    python scripts/bench/loggers.py --rounds 30 --out loggers.json [SETTING...]

One training run for each way in which wandb may have no server. In every other stretch of steps the
loggers get no line and the processes of wandb are stopped; seconds are those of whole stretches,
with them the CPU seconds of all processes of the run, and neighbouring stretches are compared. What
wandb does by the clock (its own measurements, attempts to reach the server) and came due while it
was stopped, it does in the next stretch with loggers: the result is rather too high than too low.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import alternating
import proc

STRETCH = 20
"""Steps in a row with loggers, or without."""
WARMUP = 3 * STRETCH
"""Steps after which wandb runs or tries to."""
LOGGERS = "logging.loggers=[wandb,tensorboard]"
KINDS = {
    "offline": "logging.wandb_mode=offline",
    "server silent, auto": "logging.wandb_mode=auto",
    "server silent, online": "logging.wandb_mode=online",
}
"""With `auto` the run is offline after three seconds; with `online` wandb tries for a minute and a
half first."""


def work(arguments: Sequence[str]) -> None:
    """A worker: the real one, with every other stretch without loggers."""
    from megads.train.sinks import Background

    record = Background.record
    is_bare = False

    def begin(number: int) -> Sequence[float] | None:
        nonlocal is_bare
        place, stretch = number % STRETCH, number // STRETCH
        if place:
            return None
        # With, without, without, with: a drift of the machine counts for and against.
        is_bare = stretch % 4 in (1, 2) and number >= WARMUP
        for pid in proc.family(os.getpid())[1:]:
            proc.send(pid, signal.SIGSTOP if is_bare else signal.SIGCONT)
        return time.perf_counter(), proc.cpu_seconds(proc.family(os.getppid()))

    Background.record = (  # type: ignore[method-assign]
        lambda self, line: None if is_bare else record(self, line)
    )
    alternating.train(arguments, begin)


def measure(rounds: int, kind: str, words: Sequence[str]) -> dict[str, Any]:
    """One run: what stretches with loggers cost more than those without."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        os.environ["WANDB_API_KEY"] = "0" * 40
        steps = WARMUP + (4 * rounds + 1) * STRETCH
        words = [LOGGERS, KINDS[kind], *words]
        clocks = alternating.launch("loggers:work", steps, words)
    time_s, cpu_s = (_compare(clock) for clock in zip(*clocks, strict=True))
    return {"time": time_s, "cpu": cpu_s}


def _compare(begun: Sequence[float]) -> dict[str, Any]:
    """The first of `begun` is that of step STRETCH, a stretch's number one."""
    spent = [after - before for before, after in itertools.pairwise(begun)]
    first = WARMUP // STRETCH  # the first of a round
    full_first = zip(spent[first::4], spent[first + 1 :: 4], strict=False)
    bare_first = zip(spent[first + 2 :: 4], spent[first + 3 :: 4], strict=False)
    return alternating.compare([*full_first, *((full, bare) for bare, full in bare_first)])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="of four stretches, in each run")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="more settings, as for megads-train")
    options = parser.parse_args()
    result = {}
    for kind in options.kinds:
        result[kind] = measure(options.rounds, kind, options.words)
        print(json.dumps({kind: result[kind]}, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"cores": os.cpu_count(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
