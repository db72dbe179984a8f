"""Kill training at random moments, damage its files, fill its disk; nothing may be lost.

    python scripts/kill_test.py [--rounds 100] [--seed 1] [--directory DIR]

Runs `megads-train` on a tiny model in several layouts, saving asynchronously every step. In each
round it kills one process, or all, or damages files of a checkpoint after that, or leaves too
little space for the next one. Every restart must load the newest checkpoint that is whole, and the
loss curve of each finished run must equal the uninterrupted run's to the last bit.

Files are in a small tmpfs of its own where it may mount one, so that the disk can be filled; else,
or with --directory, "full" rounds limit the size of files (RLIMIT_FSIZE). Prints a line per round;
exits with 1 at the first thing that is wrong, and leaves the files then.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kill_run import FILE_LIMIT, START_LIMIT_S, WORDS, Run, Wrong, curve, damage, without_space
from megads.data.indexed import TokenWriter

DISK_BYTES = 64 << 20
LAYOUTS = {
    "dp2": ["parallel=dp2"],
    "tp2": ["parallel=tp2"],
    "pp2": ["parallel=pp2"],
    "dp2zero3": ["parallel=dp2zero3"],
    "dp2zero2 nvme": ["parallel=dp2zero2", "parallel.offload=nvme"],
    "dp3zero1": ["parallel=dp3zero1"],
    "tp2dp2zero2": ["parallel=tp2dp2zero2"],
}
FAULTS = ["kill one", "kill one", "kill all", "kill all", "truncate", "flip", "flip", "full"]


@contextlib.contextmanager
def workplace(given: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A directory for the files, and the small file system that it is, if it could be mounted."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given, None
        return
    place = Path(tempfile.mkdtemp(prefix="megads-kill-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield place, place if mounted else None
    if any(place.glob("run-*")):  # left for whoever looks into what went wrong
        return
    if mounted:
        subprocess.run(["umount", str(place)], check=True)
    shutil.rmtree(place)


def write_tokens(prefix: Path) -> str:
    """A token file; returns its prefix."""
    rng = np.random.default_rng(5)
    with TokenWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            writer.add_document(rng.integers(0, 101, int(rng.integers(5, 120))))
    return str(prefix)


class Driver:
    """Goes from run to run, and in each from fault to fault, until all rounds are done."""

    def __init__(
        self, place: Path, mounted: Path | None, *, rounds: int, steps: int, seed: int
    ) -> None:
        self.place, self.mounted, self.rounds, self.steps = place, mounted, rounds, steps
        self.draw = random.Random(seed)
        self.data = f"data.paths=[{write_tokens(place / 'tokens')}]"
        self.references: dict[str, list[tuple[object, ...]]] = {}
        self.done: Counter[str] = Counter()
        self.runs = 0

    def run(self, layouts: list[str]) -> None:
        while self.done.total() < self.rounds:
            self.one_run(layouts[self.runs % len(layouts)])

    def reference(self, layout: str, words: list[str]) -> list[tuple[object, ...]]:
        if layout not in self.references:
            run = Run(self.place / "straight", words)
            run.start()
            if run.wait(2 * START_LIMIT_S) != 0:
                raise Wrong(f"the uninterrupted run failed: {run.text()[-2000:]}")
            self.references[layout] = curve(run.path)
            shutil.rmtree(run.path)
        return self.references[layout]

    def one_run(self, layout: str) -> None:
        """A run with faults until it has finished, or rounds are done and it may finish."""
        words = [*WORDS, f"train.steps={self.steps}", self.data, *LAYOUTS[layout]]
        want = self.reference(layout, words)
        self.runs += 1
        run = Run(self.place / f"run-{self.runs}", words)
        while not self.finished(run):
            if self.done.total() >= self.rounds:
                run.start()
                if run.wait(2 * START_LIMIT_S) != 0:
                    raise Wrong(f"failed by itself: {run.text()[-2000:]}")
                run.check_start()
                break
            fault = self.draw.choice(FAULTS)
            what = self.one_round(run, fault)
            self.done[fault] += 1
            run.look_ahead()
            print(
                f"{self.done.total():4} {layout:14} {fault:9} next {run.expected}  {what}",
                flush=True,
            )
        if curve(run.path) != want:
            raise Wrong(f"{run.path}: another loss curve than the uninterrupted run")
        print(
            f"     {layout}: finished after {run.starts} starts, the curve is bitwise the same",
            flush=True,
        )
        shutil.rmtree(run.path)

    def finished(self, run: Run) -> bool:
        return run.process is not None and run.process.returncode == 0

    def one_round(self, run: Run, fault: str) -> str:
        """One start and its end; what happened, in words."""
        if fault == "full":
            what = without_space(run, self.mounted)
            run.check_start()
            return what
        run.start()
        if self.draw.random() < 0.8:
            run.wait_for_steps()
            time.sleep(self.draw.uniform(0, 1.5))
        else:
            time.sleep(self.draw.uniform(0, 10))
        run.kill(everything=fault != "kill one", draw=self.draw)
        run.check_start()
        if fault in ("truncate", "flip"):
            return damage(run, self.draw, flip=fault == "flip") or "nothing to damage yet"
        return f"ended with {run.wait()}"


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directory", type=Path, help="default: a small tmpfs, if one may mount it"
    )
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parser.parse_args()
    with workplace(options.directory) as (place, mounted):
        how = f"a tmpfs of {DISK_BYTES >> 20} MiB" if mounted else f"files of {FILE_LIMIT} bytes"
        print(f"in {place}; the disk is full by {how}", flush=True)
        driver = Driver(
            place, mounted, rounds=options.rounds, steps=options.steps, seed=options.seed
        )
        try:
            driver.run(options.layouts)
        except Wrong as error:
            print(f"WRONG: {error}\nfiles are left in {place}", flush=True)
            return 1
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(driver.done.items()))
    print(f"{driver.done.total()} rounds ({faults}) in {driver.runs} runs: nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
