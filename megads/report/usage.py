"""Where memory and time go: charts of kinds, phases and ranks. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from megads.parallel.layout import ParallelLayout
from megads.report.figures import COLORS, FEW_POINTS, LEGEND_ABOVE, Figure, text
from megads.report.runs import Line, Run, finite
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
MAX_LABEL = 24
"""Characters of a name beside a bar."""


def memory_figure(runs: Sequence[Run]) -> Figure | None:
    """Bytes by kind on the rank that uses most, and the most that it used in all."""
    rows = [run.name for run in runs]
    offloaded = [i for i, run in enumerate(runs) if any(_most(run, k) for k in OFFLOADED_KINDS)]
    traces = []
    for (key, kind), color in zip((DEVICE_KINDS | OFFLOADED_KINDS).items(), COLORS, strict=True):
        most = {i: gib for i, run in enumerate(runs) if (gib := _most(run, key))}
        if key in OFFLOADED_KINDS:
            most = {len(rows) + offloaded.index(i): gib for i, gib in most.items()}
        if most:
            traces.append(_bar(kind, most, color))
    if not traces:
        return None
    peaks = {i: gib for i, run in enumerate(runs) if (gib := _most(run, "peak_memory_bytes"))}
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak of everything",
            "x": list(peaks.values()),
            "y": list(peaks),
            "marker": {"symbol": "diamond", "size": 10, "color": "#dc2626"},
            "hovertemplate": "%{x:.4g}<extra>%{fullData.name}</extra>",
        }
    )
    shape = _stacked("GiB", rows + [f"{rows[i]}, offloaded" for i in offloaded])
    caption = "The most on any rank. On a CPU the peak is that of the process, libraries included."
    return Figure("Memory by kind", traces, shape, caption)


def phase_names(runs: Sequence[Run]) -> list[str]:
    """Phases of all runs, those that take longest in a median step first."""
    medians: dict[str, float] = {}
    for found in map(_phases, runs):
        for name in {name for _, phases in found for name in phases}:
            seconds = median(phases.get(name, 0.0) for _, phases in found)
            medians[name] = max(seconds, medians.get(name, 0.0))
    return sorted(medians, key=lambda name: (-medians[name], name))


def phase_figures(runs: Sequence[Run], colors: Mapping[str, str]) -> list[Figure]:
    """The median step of every run by phase, then each run's phases over its steps."""
    timed = [(run, found) for run in runs if (found := _phases(run))]
    if not timed:
        return []
    bars = [
        _bar(
            text(name),
            {
                row: median(phases.get(name, 0.0) for _, phases in found)
                for row, (_, found) in enumerate(timed)
            },
            colors[name],
        )
        for name in phase_names(runs)
    ]
    caption = "Of the rank that writes metrics.jsonl; time inside another phase counts once."
    shape = _stacked("s", [run.name for run, _ in timed])
    figures = [Figure("Median step by phase", bars, shape, caption)]
    return figures + [_over_steps(run, found, colors) for run, found in timed]


def rank_figure(run: Run) -> Figure | None:
    """Each rank's own work in a step, relative to the median of the ranks in that step."""
    timed = [(line["step"], times) for line in run.steps if (times := _rank_times(line))]
    if not timed or len(timed[-1][1]) == 1:
        return None
    count = len(timed[-1][1])
    layout = _layout(run.config_at(timed[-1][0]), count)
    # After a change of layout the earlier ranks are others.
    timed = [
        (step, _relative(times))
        for step, times in timed
        if len(times) == count and _layout(run.config_at(step), count) == layout
    ]
    columns = min(len(timed), MAX_COLUMNS)
    bounds = [len(timed) * i // columns for i in range(columns + 1)]
    groups = [timed[low:high] for low, high in pairwise(bounds)]
    # The slowest of a group stands for it: one slow step among many is what is looked for.
    ratios = [[max(times[rank] for _, times in g) for g in groups] for rank in range(count)]
    ranks = sorted(sorted(range(count), key=lambda r: -sum(ratios[r]))[:MAX_ROWS])
    title = f"Own work of each rank: {run.name}"
    caption = "Time of a rank without waiting for others, relative to the median rank of the step."
    if len(ranks) < count:
        caption += f" The {len(ranks)} slowest of {count} ranks."
    heat = {
        "type": "heatmap",
        "x": [group[-1][0] for group in groups],
        "y": [_rank_name(rank, layout) for rank in ranks],
        "z": [ratios[rank] for rank in ranks],
        "zmid": 1.0,
        "colorscale": [[0, "#3b82f6"], [0.5, "#9ca3af"], [1, "#dc2626"]],
        "hovertemplate": "%{y}, step %{x}: %{z:.2f} of the median<extra></extra>",
    }
    shape = {
        "height": 140 + 16 * max(len(ranks), 6),
        "yaxis": {"autorange": "reversed", "type": "category"},
        "xaxis": {"title": {"text": "step"}},
    }
    return Figure(title, [heat], shape, caption)


def _most(run: Run, key: str) -> float:
    """The largest value of a number of bytes, in GiB; 0 without any."""
    found = [n for line in run.steps if (n := finite(line, key)) is not None]
    return max(found, default=0.0) / 2**30


def _bar(name: str, rows: Mapping[int, float], color: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "x": list(rows.values()),
        "marker": {"color": color},
        "hovertemplate": "%{x:.4g}<extra>%{fullData.name}</extra>",
    }


def _stacked(unit: str, rows: Sequence[str]) -> dict[str, Any]:
    short = [row if len(row) <= MAX_LABEL else "…" + row[1 - MAX_LABEL :] for row in rows]
    return {
        "barmode": "stack",
        **LEGEND_ABOVE,
        "height": 170 + 44 * len(rows),
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {
            "range": [len(rows) - 0.4, -0.6],
            "tickvals": list(range(len(rows))),
            "ticktext": [text(row) for row in short],
            "showgrid": False,
            "zeroline": False,
        },
    }


def _phases(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Seconds by phase, of each step that has them."""
    found = []
    for line in run.steps:
        given = line.get("phases_s")
        if isinstance(given, dict):
            seconds = {name: s for name in given if (s := finite(given, name)) is not None}
            found.append((line["step"], seconds))
    return found


def _over_steps(
    run: Run, found: list[tuple[int, dict[str, float]]], colors: Mapping[str, str]
) -> Figure:
    """A stacked area; the steps that are drawn are the slowest and fastest of their stretch."""
    kept = thin([sum(phases.values()) for _, phases in found], MAX_AREA_POINTS)
    shown = [found[i] for i in kept]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(shown) <= FEW_POINTS else "lines",
            "name": text(name),
            "stackgroup": "phases",
            "line": {"width": 0.5, "color": colors[name]},
            "marker": {"size": 4},
            "x": [step for step, _ in shown],
            "y": [phases.get(name, 0.0) for _, phases in shown],
        }
        for name in phase_names([run])
    ]
    shape = {
        **LEGEND_ABOVE,
        "yaxis": {"title": {"text": "s"}},
        "xaxis": {"title": {"text": "step"}},
        "height": 360,
    }
    return Figure(f"Phases of a step: {run.name}", traces, shape)


def _rank_times(line: Line) -> list[float]:
    """Seconds of each rank; empty where there are none, or not of every rank."""
    given = line.get("rank_times_s")
    if not isinstance(given, list):
        return []
    times = [s for time in given if (s := finite({"time": time}, "time")) is not None]
    return times if len(times) == len(given) else []


def _relative(times: list[float]) -> list[float]:
    middle = median(times)
    return [time / middle if middle > 0 else 1.0 for time in times]


def _layout(config: Mapping[str, object], world_size: int) -> ParallelLayout | None:
    """Where the ranks were, if the configuration's tp and pp fit their number."""
    tp, pp = config.get("parallel.tp"), config.get("parallel.pp")
    if not isinstance(tp, int) or not isinstance(pp, int) or world_size % (tp * pp):
        return None
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def _rank_name(rank: int, layout: ParallelLayout | None) -> str:
    if layout is None:
        return f"rank {rank}"
    where = layout.coords(rank)
    return f"rank {rank}: pp{where.pp} dp{where.dp} tp{where.tp}"
