"""One training run of the demo in which something is left out of every other stretch of steps.

So whatever else happens to the machine or to the process meets both kinds of stretches alike.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEMO = ["model=gpt-tiny", "parallel=tp2pp2", "eval.every=0", "checkpoint.save_last=false"]
TIMES = "ALTERNATING_TIMES"
"""Variable of the environment with the file that rank 0 leaves its clocks in."""


def train(arguments: Sequence[str], begin: Callable[[int], Sequence[float] | None]) -> None:
    """What a worker of `launch` calls: the real one, but `begin` comes before every step, with its
    number, and may leave out what it likes; clocks that it returns are kept."""
    from megads.cli import train_worker
    from megads.launch.env import started
    from megads.train import loop
    from megads.train.timing import StepTimer

    step, whole, place = StepTimer.step, loop.train, started()
    clocks: list[Sequence[float]] = []

    def timed_step(self: StepTimer, number: int) -> Any:
        if (read := begin(number)) is not None:
            clocks.append(read)
        return step(self, number)

    def trained(*args: Any, **words: Any) -> int:
        status = whole(*args, **words)
        if place is not None and place.rank == 0:
            Path(os.environ[TIMES]).write_text(json.dumps(clocks))
        return status

    StepTimer.step = timed_step  # type: ignore[method-assign]
    loop.train = trained
    train_worker.work(arguments)


def launch(work: str, steps: int, words: Sequence[str]) -> list[list[float]]:
    """The clocks of rank 0 in a run whose workers call `work`, a module of this folder and its
    function (MODULE:FUNCTION)."""
    from megads.config.compose import compose
    from megads.launch.local import Work, handed_over, launch_local

    with tempfile.TemporaryDirectory() as folder:
        os.environ[TIMES] = str(Path(folder, "times.json"))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        config = compose([*DEMO, f"train.steps={steps}", f"run.dir={folder}/run", *words])
        with handed_over(config) as arguments:
            launch_local(config, 4, Work(work, "megads.train.loop"), arguments)
        return json.loads(Path(os.environ[TIMES]).read_text())  # type: ignore[no-any-return]


def compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of (with it, without it) and of their differences as shares of the one without.

    `interval` holds the true median of these shares with 95 % confidence.
    """
    bare = statistics.median(without for _, without in pairs)
    shares = sorted((full - without) / bare for full, without in pairs)
    reach = round(0.98 * math.sqrt(len(shares)))  # ranks of a median: binomial, 1.96 deviations
    middle = len(shares) // 2
    return {
        "pairs": len(pairs),
        "full_s": statistics.median(full for full, _ in pairs),
        "bare_s": bare,
        "overhead": statistics.median(shares),
        "interval": [shares[max(0, middle - reach)], shares[min(len(shares) - 1, middle + reach)]],
    }
