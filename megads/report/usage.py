"""Where memory and time go: charts of kinds, phases and ranks. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from megads.parallel.layout import ParallelLayout
from megads.report.figures import Figure, phase_colors, text
from megads.report.runs import Line, Run, number
from megads.report.thinning import thin

DEVICE_KINDS = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "buffer_bytes": "tables",
    "activation_bytes": "activations",
}
OFFLOADED_KINDS = {
    "host_bytes": "states on the host",
    "activation_host_bytes": "activations on the host",
    "file_bytes": "states in a file",
}
MAX_AREA_POINTS = 500
MAX_COLUMNS, MAX_ROWS = 300, 128
"""Steps and ranks of a chart of ranks."""


def memory_figure(runs: Sequence[Run]) -> Figure | None:
    """Bytes by kind on the rank that uses most, and the most that it used in all."""
    colors = phase_colors([*DEVICE_KINDS.values(), *OFFLOADED_KINDS.values()])
    names = [text(run.name) for run in runs]
    traces = []
    for key, kind in (DEVICE_KINDS | OFFLOADED_KINDS).items():
        most = [_most(run, key) for run in runs]
        if any(most):
            rows = [_row(name, offloaded=key in OFFLOADED_KINDS) for name in names]
            traces.append(_bar(kind, rows, [m / 2**30 for m in most], colors[kind]))
    if not traces:
        return None
    peaks = [_most(run, "peak_memory_bytes") / 2**30 for run in runs]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak of everything",
            "x": peaks,
            "y": [_row(name, offloaded=False) for name in names],
            "marker": {"symbol": "diamond", "size": 10, "color": "#dc2626"},
        }
    )
    return Figure("Memory by kind", traces, _stacked("GiB", len(runs)))


def phase_figures(runs: Sequence[Run]) -> list[Figure]:
    """The median step of every run by phase, then each run's phases over its steps."""
    timed = [(run, lines) for run in runs if (lines := _phase_lines(run))]
    if not timed:
        return []
    names = list(dict.fromkeys(n for _, lines in timed for line in lines for n in _phases(line)))
    colors = phase_colors(names)
    bars = [
        _bar(
            text(name),
            [text(run.name) for run, _ in timed],
            [median(_phases(line).get(name, 0.0) for line in lines) for _, lines in timed],
            colors[name],
        )
        for name in names
    ]
    caption = "Of the rank that writes metrics.jsonl; time inside another phase counts once."
    figures = [Figure("Median step by phase", bars, _stacked("s", len(timed)), caption)]
    return figures + [_over_steps(run, lines, colors) for run, lines in timed]


def rank_figure(run: Run) -> Figure | None:
    """Each rank's own work in a step, relative to the median of the ranks in that step."""
    lines = [line for line in run.steps if _rank_times(line)]
    if not lines:
        return None
    count = len(_rank_times(lines[-1]))
    layout = _layout(run, count)
    lines = [line for line in lines if len(_rank_times(line)) == count]
    groups = [
        lines[low:high]
        for low, high in pairwise(
            len(lines) * i // min(len(lines), MAX_COLUMNS)
            for i in range(min(len(lines), MAX_COLUMNS) + 1)
        )
    ]
    # The slowest of a group stands for it: one slow step among many is what is looked for.
    ratios = [
        [max(_relative(line)[rank] for line in group) for group in groups] for rank in range(count)
    ]
    ranks = sorted(sorted(range(count), key=lambda r: -sum(ratios[r]))[:MAX_ROWS])
    title = f"Own work of each rank: {run.name}"
    caption = "Time of a rank without waiting for others, relative to the median rank of the step."
    if len(ranks) < count:
        caption += f" The {len(ranks)} slowest of {count} ranks."
    heat = {
        "type": "heatmap",
        "x": [group[-1]["step"] for group in groups],
        "y": [_rank_name(rank, layout) for rank in ranks],
        "z": [ratios[rank] for rank in ranks],
        "zmid": 1.0,
        "colorscale": [[0, "#3b82f6"], [0.5, "#9ca3af"], [1, "#dc2626"]],
        "hovertemplate": "%{y}, step %{x}: %{z:.2f} of the median<extra></extra>",
    }
    shape = {
        "height": 140 + 16 * max(len(ranks), 6),
        "yaxis": {"autorange": "reversed", "type": "category"},
        "xaxis": {"title": {"text": "step"}, "type": "category", "nticks": 10},
    }
    return Figure(title, [heat], shape, caption)


def _most(run: Run, key: str) -> float:
    found = [n for line in run.steps if (n := number(line, key)) is not None and math.isfinite(n)]
    return max(found, default=0.0)


def _row(name: str, *, offloaded: bool) -> str:
    return f"{name}, offloaded" if offloaded else name


def _bar(name: str, rows: list[str], widths: list[float], color: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": rows,
        "x": widths,
        "marker": {"color": color},
        "hovertemplate": "%{y}: %{x:.4g}<extra>%{fullData.name}</extra>",
    }


def _stacked(unit: str, rows: int) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "showlegend": True,
        "height": 170 + 44 * rows,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }


def _phase_lines(run: Run) -> list[Line]:
    return [line for line in run.steps if _phases(line)]


def _phases(line: Line) -> Mapping[str, float]:
    phases = line.get("phases_s")
    if not isinstance(phases, dict):
        return {}
    return {name: s for name in phases if (s := number(phases, name)) is not None}


def _over_steps(run: Run, lines: list[Line], colors: Mapping[str, str]) -> Figure:
    """A stacked area; the steps that are drawn are the slowest and fastest of their stretch."""
    shown = [lines[i] for i in thin([sum(_phases(x).values()) for x in lines], MAX_AREA_POINTS)]
    names = [name for name in colors if any(name in _phases(line) for line in shown)]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": text(name),
            "stackgroup": "phases",
            "line": {"width": 0.5, "color": colors[name]},
            "x": [line["step"] for line in shown],
            "y": [_phases(line).get(name, 0.0) for line in shown],
        }
        for name in names
    ]
    shape = {
        "showlegend": True,
        "yaxis": {"title": {"text": "s"}},
        "xaxis": {"title": {"text": "step"}},
        "height": 360,
    }
    return Figure(f"Phases of a step: {run.name}", traces, shape)


def _rank_times(line: Line) -> list[float]:
    times = line.get("rank_times_s")
    if not isinstance(times, list) or not all(isinstance(t, int | float) for t in times):
        return []
    return times


def _relative(line: Line) -> list[float]:
    times = _rank_times(line)
    middle = median(times)
    return [time / middle if middle > 0 else 1.0 for time in times]


def _layout(run: Run, world_size: int) -> ParallelLayout | None:
    """Where the ranks were, if the configuration's tp and pp fit their number."""
    tp, pp = run.config.get("parallel.tp"), run.config.get("parallel.pp")
    if not isinstance(tp, int) or not isinstance(pp, int) or world_size % (tp * pp):
        return None
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def _rank_name(rank: int, layout: ParallelLayout | None) -> str:
    if layout is None:
        return f"rank {rank}"
    where = layout.coords(rank)
    return f"rank {rank} (pp {where.pp}, dp {where.dp}, tp {where.tp})"
