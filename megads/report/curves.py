"""Curves over the steps of runs. Pure: no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megads.report.figures import FEW_POINTS, Figure, run_color, run_dash, text
from megads.report.runs import Line, Run, finite, number
from megads.report.thinning import thin

MAX_POINTS = 2000
"""Of one curve; about two for each pixel of a wide screen."""
MAX_MARKS = 200
"""Of the steps of one curve whose value is not finite."""


@dataclass(frozen=True)
class Chart:
    """Curves of one or more keys of metrics.jsonl; the second and later keys are dashed.

    `scale`: what values are multiplied by for `unit`.
    """

    title: str
    keys: tuple[str, ...]
    unit: str
    lines: Callable[[Run], Sequence[Line]] = lambda run: run.steps
    scale: float = 1.0
    logarithmic: bool = False
    layout: tuple[tuple[str, Any], ...] = ()


FROM_ZERO = (("rangemode", "tozero"),)


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    value: float


Tokens = Callable[[int], float | None]
"""Tokens that a run had seen after a step."""


CHARTS = (
    Chart("Training loss", ("loss",), "nats per token", logarithmic=True),
    Chart(
        "Validation loss", ("val_loss",), "nats per token", lambda r: r.evaluations,
        logarithmic=True,
    ),
    Chart("Gradient norm", ("grad_norm",), "before clipping", logarithmic=True),
    Chart("Learning rate", ("lr",), "", layout=(("exponentformat", "power"),)),
    Chart("Throughput", ("tokens_per_second",), "tokens/s", layout=FROM_ZERO),
    Chart("Utilisation", ("mfu", "hfu"), "%", scale=100, layout=FROM_ZERO),
    Chart("Step time", ("step_time_s",), "s", layout=FROM_ZERO),
    Chart("Waiting for data and saves", ("data_wait_s", "save_s"), "s", layout=FROM_ZERO),
    Chart("Peak memory", ("peak_memory_bytes",), "GiB", scale=2**-30, layout=FROM_ZERO),
)  # fmt: skip


def curve_figures(runs: Sequence[Run]) -> list[Figure]:
    """Every chart that some run has values for."""
    figures, tokens = [], [tokens_at(run) for run in runs]
    for chart in CHARTS:
        traces = [
            trace
            for index, run in enumerate(runs)
            for trace in _traces(chart, run, index, tokens[index])
        ]
        if traces:
            axis = {"title": {"text": chart.unit}, **dict(chart.layout)}
            figures.append(
                Figure(
                    chart.title,
                    traces,
                    {"yaxis": axis},
                    by_step=True,
                    logarithmic=chart.logarithmic,
                )
            )
    return figures


def points(lines: Iterable[Line], key: str) -> list[Point]:
    """The values that lines have for a key, those included that are not finite."""
    return [Point(line["step"], n) for line in lines if (n := number(line, key)) is not None]


def tokens_at(run: Run) -> Tokens:
    """Tokens by step; between logged steps a straight line."""
    known: list[tuple[int, float]]
    known = [(line["step"], n) for line in run.steps if (n := finite(line, "tokens")) is not None]
    steps = [0, *(step for step, _ in known)]
    counts = [0.0, *(count for _, count in known)]

    def tokens(step: int) -> float | None:
        after = bisect_left(steps, step)
        if not known or after == len(steps):
            return None
        if steps[after] == step:
            return counts[after]
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return counts[after - 1] + share * (counts[after] - counts[after - 1])

    return tokens


def _traces(chart: Chart, run: Run, index: int, tokens: Tokens) -> list[dict[str, Any]]:
    curves: list[tuple[str, str, list[Point]]] = []
    for position, key in enumerate(chart.keys):
        label = run.name if len(chart.keys) == 1 else f"{run.name}, {key}"
        curves.append((label, run_dash(index + 8 * position), points(chart.lines(run), key)))
    if chart.keys == ("val_loss",):
        curves += [(f"{run.name}, {s}", "dot", found) for s, found in _by_source(run).items()]
    return [
        trace | {"name": text(label), "legendgroup": str(index)}
        for label, dash, found in curves
        for trace in _curve(found, tokens, index, dash, chart.scale)
    ]


def _by_source(run: Run) -> dict[str, list[Point]]:
    """Validation loss of each source, where there are several."""
    lines: dict[str, list[Line]] = {}
    for line in run.evaluations:
        sources = line.get("val_loss_by_source")
        for source, loss in sources.items() if isinstance(sources, dict) else ():
            lines.setdefault(source, []).append({"step": line["step"], "loss": loss})
    return {source: points(found, "loss") for source, found in lines.items()}


def _curve(
    found: list[Point], tokens: Tokens, index: int, dash: str, scale: float
) -> list[dict[str, Any]]:
    """A line through the finite values, and a cross for each step that has another one."""
    if not found:
        return []
    finite = [point for point in found if math.isfinite(point.value)]
    shown = [finite[i] for i in thin([point.value for point in finite], MAX_POINTS)]
    line = {
        "type": "scatter",
        "x": [point.step for point in shown],
        "y": [point.value * scale for point in shown],
        "meta": {"run": index, "tokens": [tokens(point.step) for point in shown]},
        "mode": "lines+markers" if len(shown) <= FEW_POINTS else "lines",
        "line": {"color": run_color(index), "dash": dash, "width": 1.6},
        "marker": {"size": 4},
    }
    marks = _marks(found, scale)
    if not marks:
        return [line]
    crosses = {
        "type": "scatter",
        "x": [point.step for point, _ in marks],
        "y": [y for _, y in marks],
        "text": [f"{point.value} at step {point.step}" for point, _ in marks],
        "hoverinfo": "text+name",
        "meta": {"run": index, "tokens": [tokens(point.step) for point, _ in marks]},
        "mode": "markers",
        "marker": {"symbol": "x", "size": 9, "color": "#dc2626"},
    }
    return [line, crosses]


def _marks(found: list[Point], scale: float) -> list[tuple[Point, float]]:
    """Values that are not finite, each with the height to draw it at: the finite value before."""
    height = next((p.value for p in found if math.isfinite(p.value)), 0.0)
    marks: list[tuple[Point, float]] = []
    for point in found:
        if math.isfinite(point.value):
            height = point.value
        elif len(marks) < MAX_MARKS:
            marks.append((point, height * scale))
    return marks
