"""What logging, timers and the watchdog cost of a step of the demo model, measured side by side.

    python scripts/bench/overhead.py --steps 2000 --out overhead.json

One training run through the real workers: in every other step all of it is left out on all ranks
(no phases, no report, no watchdog). Seconds are those from the beginning of a step to that of the
next one, on rank 0, and beside them the CPU seconds of that rank, all threads together. Pairs of
neighbouring steps are compared: the median of their differences is the overhead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import alternating

WARMUP = 10


def work(arguments: Sequence[str]) -> None:
    """A worker: the real one, with every other step bare."""
    from megads.launch.watchdog import Watchdog
    from megads.parallel.phases import Durations, Phases
    from megads.train import loop

    names = ("_enter", "__exit__", "begin", "end")
    full = {name: getattr(Phases, name) for name in names}
    bare = {
        "_enter": lambda self, name, where, *, waits: self,
        "__exit__": lambda self, *error: None,
        "begin": lambda self: None,
        "end": lambda self: Durations({"data": 0.0}, {}),
    }
    report, look = loop._report, Watchdog._look
    is_bare = False

    def begin(number: int) -> Sequence[float]:
        nonlocal is_bare
        clocks = time.perf_counter(), time.process_time()
        is_bare = number % 2 == 0
        for name, method in (bare if is_bare else full).items():
            setattr(Phases, name, method)
        return clocks

    loop._report = lambda *args: None if is_bare else report(*args)  # type: ignore[assignment]
    Watchdog._look = lambda self: None if is_bare else look(self)  # type: ignore[method-assign]
    alternating.train(arguments, begin)


def measure(steps: int, words: Sequence[str]) -> dict[str, Any]:
    """One run: what the full steps cost more than the bare ones, in seconds and CPU seconds."""
    begun = alternating.launch("overhead:work", steps + WARMUP + 1, words)[WARMUP:]
    time_s, cpu_s = (_compare(clock) for clock in zip(*begun, strict=True))
    return {"time": time_s, "cpu": cpu_s}


def _compare(begun: Sequence[float]) -> dict[str, Any]:
    seconds = [after - before for before, after in itertools.pairwise(begun)]
    # Step WARMUP + 1 is the first and an odd one, so full; the ones after it take turns.
    return alternating.compare(list(zip(seconds[::2], seconds[1::2], strict=False)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="more settings, as for megads-train")
    options = parser.parse_args()
    result = measure(options.steps, options.words)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps({"cores": os.cpu_count(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
