"""The parity tables through `megads-train` itself: processes, files and command line included.

    python -m tests.parity.command_line layouts [--families gpt llama] [--only tp2 pp2vpp2]
    python -m tests.parity.command_line resume
    python -m tests.parity.command_line zero [--only dp2 pp2vpp2dp2]

Prints one line per run, exits with 1 if any differs. The test suite runs the same tables in its
worker pools, where a run costs half a second instead of the start of an interpreter per rank.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megads.config.layout_name import parse_layout_name
from tests.parity.test_layouts import LAYOUTS
from tests.training import (
    FAMILIES,
    column,
    command_words,
    read_checkpoint,
    read_metrics,
    write_tokens,
)

LIMIT_S = 300
SAVED = ["checkpoint.save_last=true"]
RTOL = 1e-5
SHARDED = ["dp2", "dp4", "tp2dp2", "pp2dp2", "pp2vpp2dp2", "tp2pp2dp2"]
SMALL = ["parallel.bucket_mb=0.004", "parallel.offload_budget_mb=0.05"]
RESUMED = ["dp2zero1", "tp4", "pp4", "pp2vpp2", "single", "tp2pp2"]


def train(run_dir: Path, data: str, family: str, *overrides: str) -> list[dict[str, Any]]:
    """Run the command; the lines of its metrics.jsonl. Raises on any other status than 0."""
    command = Path(sys.executable).with_name("megads-train")
    words = command_words(run_dir, data, family, *overrides)
    done = subprocess.run(
        [command, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"megads-train ended with {done.returncode}\n{done.stderr}")
    return read_metrics(run_dir)


def difference(got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]], name: str) -> float:
    """Largest relative difference between two columns of the metrics."""
    a, b = column(got, name), column(want, name)
    if a.shape != b.shape:
        return float("inf")
    return float(((a - b).abs() / b.abs()).max())


def curve_line(
    what: str, got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]]
) -> tuple[str, bool]:
    losses, norms = difference(got, want, "loss"), difference(got, want, "grad_norm")
    good = len(got) == len(want) and losses <= RTOL and norms <= RTOL
    return f"{what:45} loss {losses:.1e}  grad_norm {norms:.1e}", good


def layouts(
    directory: Path, data: str, families: Sequence[str], only: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Every layout's curve and initial weights against the single process."""
    for family in families:
        still = [*SAVED, "optim.lr=0", "optim.min_lr=0", "train.steps=1", "optim.total=20"]
        want = train(directory / family, data, family)
        train(directory / f"{family} start", data, family, *still)
        start = read_checkpoint(directory / f"{family} start/checkpoints/step-1")
        weights = [key for key in start if key.startswith("param/")]
        for number, name in enumerate(only or LAYOUTS):
            run_dir = directory / f"{family}-{number}"
            line, good = curve_line(
                f"{family} {name}", train(run_dir, data, family, *LAYOUTS[name]), want
            )
            train(run_dir / "start", data, family, *still, *LAYOUTS[name])
            got = read_checkpoint(run_dir / "start/checkpoints/step-1")
            same = all(torch.equal(got[key], start[key]) for key in weights)
            yield f"{line}  initial weights {'equal' if same else 'DIFFER'}", good and same


def resume(directory: Path, data: str, families: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Stopping and going on in the same layout (bitwise) and in others (the same curve)."""
    family = families[0]
    for precision in ("fp32", "bf16"):
        for layout in ("dp2", "dp2zero1", "tp2pp2"):
            words = [*SAVED, f"parallel={layout}", f"precision={precision}"]
            name = f"{precision} {layout}"
            straight, halves = directory / name, directory / f"{name} halves"
            train(straight, data, family, *words)
            train(halves, data, family, *words, "train.steps=10")
            train(halves, data, family, *words)
            a, b = (read_checkpoint(d / "checkpoints/step-20") for d in (straight, halves))
            same = a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
            yield f"{name:45} parameters and moments {'equal' if same else 'DIFFER'}", same
    want = read_metrics(directory / "fp32 tp2pp2")
    source = directory / "source"
    train(source, data, family, *SAVED, "parallel=tp2pp2", "train.steps=10")
    for layout in RESUMED:
        words = [f"checkpoint.load={source / 'checkpoints/step-10'}", f"parallel={layout}"]
        got = train(directory / f"to {layout}", data, family, *words)
        yield curve_line(f"tp2pp2 for 10 steps, then {layout}", got, want[10:])


def zero(directory: Path, data: str, only: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Every stage with every offload in every data-parallel layout, with and without accumulation:
    the curve, and parameters and moments afterwards."""
    # A key bias has no gradient but for rounding, which Adam would make large with the usual eps.
    batch = 16
    common = [*SAVED, "optim.eps=1e-4", f"train.global_batch_size={batch}"]
    want = train(directory / "single", data, "gpt", *common)
    tensors = read_checkpoint(directory / "single/checkpoints/step-20")
    product = itertools.product(only or SHARDED, range(4), ("none", "cpu", "nvme"), (1, 4))
    for number, (layout, stage, offload, accumulation) in enumerate(product):
        dp = int(parse_layout_name(layout)["dp"])
        words = [f"parallel={layout}zero{stage}", f"parallel.offload={offload}", *SMALL]
        words.append(f"train.micro_batch_size={batch // dp // accumulation}")
        run_dir = directory / f"zero-{number}"
        got = train(run_dir, data, "gpt", *common, *words)
        line, good = curve_line(
            f"{layout} zero{stage} {offload} accumulation {accumulation}", got, want
        )
        held = read_checkpoint(run_dir / "checkpoints/step-20")
        close = held.keys() == tensors.keys() and all(
            torch.allclose(held[key], tensors[key], rtol=1e-6, atol=1e-6) for key in held
        )
        yield f"{line}  parameters and moments {'close' if close else 'DIFFER'}", good and close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["layouts", "resume", "zero"])
    parser.add_argument("--families", nargs="+", default=["gpt", "llama"], choices=FAMILIES)
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT")
    arguments = parser.parse_args()
    known = {"layouts": list(LAYOUTS), "zero": SHARDED, "resume": []}[arguments.table]
    if unknown := [name for name in arguments.only if name not in known]:
        parser.error(f"{arguments.table} has no {', '.join(unknown)}; it has {', '.join(known)}")
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        data = write_tokens(directory / "tokens")
        tables = {
            "layouts": lambda: layouts(directory, data, arguments.families, arguments.only),
            "resume": lambda: resume(directory, data, arguments.families),
            "zero": lambda: zero(directory, data, arguments.only),
        }
        lines = tables[arguments.table]()
        for line, good in lines:
            bad += not good
            print(line if good else f"{line}  WRONG", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
