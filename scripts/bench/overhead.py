"""What logging, timers and the watchdog cost of a step of the demo model, measured side by side.

    python scripts/bench/overhead.py --steps 2000 --out overhead.json

One training run through the real workers: in every other step all of it is left out on all ranks
(no phases, no report, no watchdog), so that whatever else the machine does meets both kinds alike.
Seconds are those from the beginning of a step to that of the next one, on rank 0, and beside them
the CPU seconds of that rank, all threads together. Pairs of neighbouring steps are compared: the
median of their differences is the overhead, given with the interval that holds the true median with
95 % confidence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARMUP = 10
DEMO = ["model=gpt-tiny", "parallel=tp2pp2", "eval.every=0", "checkpoint.save_last=false"]
TIMES = "times.json"


def work(arguments: Sequence[str]) -> None:
    """A worker: the real one, with every other step bare."""
    from megads.cli import train_worker
    from megads.launch.env import started
    from megads.launch.watchdog import Watchdog
    from megads.parallel.phases import Durations, Phases
    from megads.train import loop
    from megads.train.timing import StepTimer

    names = ("_enter", "__exit__", "begin", "end")
    full = {name: getattr(Phases, name) for name in names}
    bare = {
        "_enter": lambda self, name, where, *, waits: self,
        "__exit__": lambda self, *error: None,
        "begin": lambda self: None,
        "end": lambda self: Durations({"data": 0.0}, {}),
    }
    step, report, look, place = StepTimer.step, loop._report, Watchdog._look, started()
    begun: list[tuple[float, float]] = []
    is_bare = False

    def timed_step(self: StepTimer, number: int) -> Any:
        nonlocal is_bare
        begun.append((time.perf_counter(), time.process_time()))
        is_bare = number % 2 == 0
        for name, method in (bare if is_bare else full).items():
            setattr(Phases, name, method)
        return step(self, number)

    StepTimer.step = timed_step  # type: ignore[method-assign]
    loop._report = lambda *args: None if is_bare else report(*args)  # type: ignore[assignment]
    Watchdog._look = lambda self: None if is_bare else look(self)  # type: ignore[method-assign]
    original = loop.train

    def trained(*args: Any, **words: Any) -> int:
        status = original(*args, **words)
        if place is not None and place.rank == 0:
            Path(os.environ["OVERHEAD_TIMES"]).write_text(json.dumps(begun))
        return status

    loop.train = trained
    train_worker.work(arguments)


def measure(steps: int, words: Sequence[str]) -> dict[str, Any]:
    """One run: what the full steps cost more than the bare ones, in seconds and CPU seconds."""
    from megads.config.compose import compose
    from megads.launch.local import Work, handed_over, launch_local

    with tempfile.TemporaryDirectory() as folder:
        os.environ["OVERHEAD_TIMES"] = str(Path(folder, TIMES))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        total = [f"train.steps={steps + WARMUP + 1}", f"run.dir={folder}/run"]
        config = compose([*DEMO, *total, *words])
        with handed_over(config) as arguments:
            launch_local(config, 4, Work("overhead:work", "megads.train.loop"), arguments)
        begun = json.loads(Path(folder, TIMES).read_text())[WARMUP:]
    time_s, cpu_s = (compare(clock) for clock in zip(*begun, strict=True))
    return {"time": time_s, "cpu": cpu_s}


def compare(begun: Sequence[float]) -> dict[str, Any]:
    """Medians of the two kinds of steps, and of their differences as shares of a bare step."""
    seconds = [after - before for before, after in itertools.pairwise(begun)]
    # Step WARMUP + 1 is the first and an odd one, so full; the ones after it take turns.
    pairs = list(zip(seconds[::2], seconds[1::2], strict=False))
    bare = statistics.median(b for _, b in pairs)
    shares = sorted((f - b) / bare for f, b in pairs)
    reach = round(0.98 * math.sqrt(len(shares)))  # ranks of a median: binomial, 1.96 deviations
    middle = len(shares) // 2
    return {
        "pairs": len(pairs),
        "full_s": statistics.median(f for f, _ in pairs),
        "bare_s": bare,
        "overhead": statistics.median(shares),
        "interval": [shares[max(0, middle - reach)], shares[min(len(shares) - 1, middle + reach)]],
    }


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
