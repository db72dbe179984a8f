"""Two timelines above each other, on one axis of time. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megads.report.figures import LEGEND_ABOVE, Figure, text
from megads.report.runs import Run
from megads.report.timeline import PASSES, ProfiledStep, Span, Timeline, span_names

MAX_SPANS = 20_000
"""Drawn of one timeline: passes, then what took longest."""
MAX_LABELS = 600
"""Passes up to which each is labelled with its microbatch."""
MAX_TIMELINES = 24
"""On one page."""


def timeline_figures(
    profiles: Sequence[tuple[Run, ProfiledStep]], colors: Mapping[str, str]
) -> list[Figure]:
    """A figure for each profiled step and position, the first positions of every step first."""
    order = sorted(profiles, key=lambda item: (item[1].dp, item[1].tp))
    return [_figure(run, profile, colors) for run, profile in order[:MAX_TIMELINES]]


def _figure(run: Run, profile: ProfiledStep, colors: Mapping[str, str]) -> Figure:
    measured, simulated = profile.measured, profile.simulated
    traces = _bars(measured, colors, "y")
    if simulated is not None:
        traces += _bars(simulated, colors, "y2")
    rows = len(measured.rows)
    shape: dict[str, Any] = {
        "barmode": "overlay",
        **LEGEND_ABOVE,
        "uniformtext": {"mode": "hide", "minsize": 9},
        "height": 170 + (1 if simulated is None else 2) * (30 + rows * max(18, 44 - 3 * rows)),
        "xaxis": {"title": {"text": "ms"}, "anchor": "y" if simulated is None else "y2"},
        "yaxis": _rows(measured, "measured", [0.0 if simulated is None else 0.54, 1.0]),
    }
    if simulated is not None:
        shape["yaxis2"] = _rows(simulated, "simulated", [0.0, 0.46]) | {"anchor": "x"}
    title = f"{run.name}, step {profile.step}, dp {profile.dp}, tp {profile.tp}"
    return Figure(title, traces, shape, _caption(profile))


def _rows(timeline: Timeline, title: str, domain: list[float]) -> dict[str, Any]:
    stages = list(timeline.rows)
    return {
        "title": {"text": title},
        "domain": domain,
        "range": [max(stages) + 0.6, min(stages) - 0.6],
        "tickvals": stages,
        "ticktext": [f"stage {stage}" for stage in stages],
        "showgrid": False,
        "zeroline": False,
    }


def _bars(timeline: Timeline, colors: Mapping[str, str], axis: str) -> list[dict[str, Any]]:
    """A trace for each phase: passes fill their row, other phases are thin and in front."""
    placed = [(stage, span) for stage, spans in timeline.rows.items() for span in spans]
    placed.sort(key=lambda item: (item[1].name not in PASSES, -item[1].seconds))
    placed = sorted(placed[:MAX_SPANS], key=lambda item: item[1].start)
    labelled = sum(span.name in PASSES for _, span in placed) <= MAX_LABELS
    return [
        _trace(name, found, colors[name], axis)
        | (_labels(span for _, span in found) if labelled and name in PASSES else {})
        for name in span_names(span for _, span in placed)
        if (found := [item for item in placed if item[1].name == name])
    ]


def _trace(name: str, placed: Sequence[tuple[int, Span]], color: str, axis: str) -> dict[str, Any]:
    is_pass = name in PASSES
    spans = [span for _, span in placed]
    # Chunks of a stage are told apart by their shade.
    shades = [max(0.4, 1 - 0.25 * (span.chunk or 0)) for span in spans]
    return {
        "type": "bar",
        "orientation": "h",
        "name": text(name),
        "legendgroup": text(name),
        "showlegend": axis == "y",
        "yaxis": axis,
        "y": [stage for stage, _ in placed],
        "base": [round(1000 * span.start, 4) for span in spans],
        "x": [round(1000 * span.seconds, 4) for span in spans],
        "width": 0.84 if is_pass else 0.24,
        "offset": -0.42 if is_pass else 0.18,
        "marker": {"color": color, "opacity": shades, "line": {"width": 0.5, "color": "#111827"}},
        "customdata": [_hover(span) for span in spans],
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
    }


def _labels(spans: Iterable[Span]) -> dict[str, Any]:
    """The microbatch inside each bar that has room for it."""
    return {
        "text": [str(span.microbatch) for span in spans],
        "textposition": "inside",
        "insidetextfont": {"color": "#ffffff"},
        "insidetextanchor": "middle",
        "textangle": 0,
    }


def _hover(span: Span) -> str:
    what = f"microbatch {span.microbatch}" if span.name in PASSES else text(span.name)
    if span.chunk:
        what += f", chunk {span.chunk}"
    return f"{what}<br>{1000 * span.seconds:.2f} ms from {1000 * span.start:.2f}"


def _caption(profile: ProfiledStep) -> str:
    def said(timeline: Timeline, word: str) -> str:
        start, end = timeline.bounds
        return f"{word}: {1000 * (end - start):.1f} ms, bubble {timeline.bubble:.1%}. "

    caption = said(profile.measured, "Measured")
    if profile.simulated is None:
        return f"{caption}Not simulated: {profile.reason}."
    caption += said(profile.simulated, "Simulated")
    caption += (
        "The bubble is the share of the stages' time, from the first pass to the last, that is in "
        "no pass; simulated passes take their stage's measured median, messages no time."
    )
    spans = sum(map(len, profile.measured.rows.values()))
    if spans > MAX_SPANS:
        caption += f" The shortest {spans - MAX_SPANS} of {spans} spans are left out, passes last."
    return caption
