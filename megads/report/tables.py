"""The summary of runs and what their configurations differ in. Pure: no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megads.report.runs import Line, Run, finite, number

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Cells as text, the first of each row being its name."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def summary(runs: Sequence[Run]) -> Table:
    """A column for each run."""
    rows: dict[str, Callable[[Run], str]] = {
        "status": _status,
        "last line": lambda run: f"{run.written:%Y-%m-%d %H:%M} UTC",
        "last action": lambda run: run.doing or NOTHING,
        "layout": _layout,
        "tokens": lambda run: _count(_last(run.steps, "tokens")),
        "final loss": lambda run: _loss(_last(run.steps, "loss")),
        "best loss": lambda run: _best(run.steps, "loss"),
        "final validation loss": lambda run: _loss(_last(run.evaluations, "val_loss")),
        "best validation loss": lambda run: _best(run.evaluations, "val_loss"),
        "median tokens/s": lambda run: _count(_median(run.steps, "tokens_per_second")),
        "median MFU": lambda run: _percent(_median(run.steps, "mfu")),
        "peak memory": lambda run: _gib(_finite(run.steps, "peak_memory_bytes")),
        "not finite": lambda run: _not_finite(run.steps),
        "steps made again": lambda run: str(run.repeated),
    }
    cells = [[name, *map(cell, runs)] for name, cell in rows.items()]
    return Table("Runs", ["", *(run.name for run in runs)], cells)


def differences(runs: Sequence[Run]) -> Table | None:
    """Settings that are not the same in all runs, except for `run.dir`; None if there are none."""
    return _differing(
        "Configuration differences", {r.name: r.config for r in runs if r.config}, {"run.dir"}
    )


def changes(run: Run) -> Table | None:
    """Settings that a later start of one run changed; None if there are none."""
    starts = {
        f"before step {step}": config for step, config in sorted(run.earlier.items()) if config
    }
    title = f"Configuration changes of {run.name}"
    return _differing(title, {**starts, "now": run.config}, set())


def _differing(
    title: str, configs: Mapping[str, Mapping[str, object]], apart_from: set[str]
) -> Table | None:
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    rows = []
    for key in keys:
        cells = [_setting(config, key) for config in configs.values()]
        if key not in apart_from and len(set(cells)) > 1:
            rows.append([key, *cells])
    return Table(title, ["setting", *configs], rows) if rows else None


def _setting(config: Mapping[str, object], key: str) -> str:
    if key not in config:
        return NOTHING
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _status(run: Run) -> str:
    wanted = run.config.get("train.steps")
    if not isinstance(wanted, int):
        return f"step {run.reached}"
    return (
        f"finished: {wanted} steps" if run.reached >= wanted else f"step {run.reached} of {wanted}"
    )


def _layout(run: Run) -> str:
    sizes = {axis: run.config.get(f"parallel.{axis}") for axis in ("tp", "pp", "dp", "zero")}
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size) or NOTHING


def _finite(lines: Sequence[Line], key: str) -> list[float]:
    return [value for line in lines if (value := finite(line, key)) is not None]


def _last(lines: Sequence[Line], key: str) -> float | None:
    return next((n for line in reversed(lines) if (n := number(line, key)) is not None), None)


def _median(lines: Sequence[Line], key: str) -> float | None:
    values = _finite(lines, key)
    return median(values) if values else None


def _best(lines: Sequence[Line], key: str) -> str:
    values = [(n, line["step"]) for line in lines if (n := finite(line, key)) is not None]
    value, step = min(values, default=(None, 0))
    return NOTHING if value is None else f"{value:.4f} at step {step}"


def _not_finite(lines: Sequence[Line]) -> str:
    bad = [
        line["step"]
        for line in lines
        for key in ("loss", "grad_norm")
        if (value := number(line, key)) is not None and not math.isfinite(value)
    ]
    steps = list(dict.fromkeys(bad))
    return f"{len(steps)}, first at step {steps[0]}" if steps else "0"


def _loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _gib(values: Sequence[float]) -> str:
    return f"{max(values) / 2**30:.2f} GiB" if values else NOTHING


def _count(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{suffix}"
    return f"{value:.0f}"
