"""Make one rank of a training run fail, hang or vanish; the job must end or recover in time.

    python scripts/fault_test.py [--rounds 6] [--kinds KIND ...] [--seed 1] [--directory DIR]

Runs `megads-train` on a tiny model in several layouts. In each round a rank, a step and a place in
it are drawn at random, and there the rank does something bad (scripts/faults/ makes it, from
outside): it raises, exits with 0, is killed or crashes; it enters a collective alone, gets no data,
is stopped, or keeps the interpreter lock; its disk hangs; or the workers' supervisor is killed.

The job must end within launch.timeout_s of that, not with 0, naming the rank, with what every rank
was doing kept, no process left and every checkpoint whole. Where it may start again it must finish,
with the loss curve of an uninterrupted run to the last bit. Some rounds run under torchrun, whose
agent takes up to 40 s more to end ranks that do not leave. Prints a line per round and a table;
exits with 1 if anything is wrong, and leaves the files of those rounds.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fault_run import KINDS, STEPS, Fault, Round, Way, layout_of, settings, uninterrupted
from kill_run import Wrong
from kill_test import write_tokens

LAYOUTS = ["tp2pp2", "dp2zero2", "tp2dp2zero1", "pp2dp2"]
KNOWN_WAYS: tuple[Way, ...] = ("ends", "recovers", "torchrun")
WAYS: tuple[Way, ...] = ("ends", "recovers", "ends", "recovers", "ends", "torchrun")
MOST_PLACES = 24
START_SHARE = 0.1
"""Of the faults, how many happen while the run is built."""


@dataclass
class Driver:
    """Draws rounds and runs them, several at once, since most of them wait."""

    place: Path
    layouts: list[str]
    limit_s: float
    draw: random.Random
    done: list[tuple[Round, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self, kinds: list[str], count: int, *, at_once: int) -> None:
        """`count` rounds of each kind; ways and layouts take turns."""
        data = write_tokens(self.place / "tokens")
        curves = {}
        for layout in self.layouts:
            straight = self.place / f"straight-{layout}"
            curves[layout] = uninterrupted(straight, settings(data, layout))
            shutil.rmtree(straight)
        rounds: list[Round] = []
        for number, (index, kind) in itertools.product(range(count), enumerate(kinds)):
            turn = number + index
            layout, way = self.layouts[turn % len(self.layouts)], WAYS[turn % len(WAYS)]
            rounds.append(
                Round(
                    path=self.place / f"{len(rounds) + 1:03}-{kind.replace(' ', '-')}",
                    layout=layout,
                    words=settings(data, layout),
                    fault=self.fault(kind, layout_of(layout).world_size),
                    way=way if way in KINDS[kind].ways else "ends",
                    limit_s=self.limit_s,
                    curve=curves[layout],
                )
            )
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self.one_round, rounds))

    def fault(self, kind: str, world: int) -> Fault:
        """A rank and a moment."""
        at_start = KINDS[kind].in_start and self.draw.random() < START_SHARE
        step = 0 if at_start else self.draw.randrange(1, STEPS + 1)
        return Fault(kind, self.draw.randrange(world), step, self.draw.randrange(MOST_PLACES))

    def one_round(self, planned: Round) -> None:
        fault, layout = planned.fault, layout_of(planned.layout)
        who = "pp {} dp {} tp {}".format(*layout.coords(fault.rank))
        where = f"step {fault.step:2} place {fault.place:2}"
        what = f"{fault.kind:15} {planned.way:8} {planned.layout:11} {who} {where}"
        try:
            seconds = planned.run()
        except Wrong as error:
            self.wrong.append(str(error))
            print(f"{what}  WRONG: {error}", flush=True)
            return
        self.done.append((planned, seconds))
        shutil.rmtree(planned.path)
        print(f"{what}  {seconds:5.1f} s", flush=True)

    def table(self) -> str:
        """By kind: how many rounds of each way, and the seconds from the fault to the end."""
        lines = [f"{'kind':15} " + " ".join(f"{way:>8}" for way in KNOWN_WAYS) + "  seconds to end"]
        for kind in dict.fromkeys(planned.fault.kind for planned, _ in self.done):
            mine = [(r, s) for r, s in self.done if r.fault.kind == kind]
            counts = Counter(planned.way for planned, _ in mine)
            times = sorted(seconds for _, seconds in mine)
            spread = f"{times[0]:.1f} to {times[-1]:.1f}, median {statistics.median(times):.1f}"
            lines.append(
                f"{kind:15} " + " ".join(f"{counts[w]:8}" for w in KNOWN_WAYS) + f"  {spread}"
            )
        layouts = Counter(planned.layout for planned, _ in self.done)
        early = sum(planned.fault.step == 0 for planned, _ in self.done)
        where = ", ".join(f"{count} in {name}" for name, count in layouts.items())
        lines.append(f"{where}; {early} while the run was built, the others in a step")
        return "\n".join(lines)


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="of each kind (default: 6)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="launch.timeout_s (default: 30)"
    )
    parser.add_argument(
        "--at-once", type=int, default=3, help="rounds at the same time (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    options = parser.parse_args()
    place = options.directory or Path(tempfile.mkdtemp(prefix="megads-faults-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"in {place}, launch.timeout_s={options.timeout:g}", flush=True)
    driver = Driver(place, options.layouts, options.timeout, random.Random(options.seed))
    driver.run(options.kinds, options.rounds, at_once=options.at_once)
    print(driver.table())
    if driver.wrong:
        print(f"{len(driver.wrong)} rounds went wrong; their files are left in {place}")
        return 1
    print(f"{len(driver.done)} rounds: every job ended or recovered in time")
    if options.directory is None:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
