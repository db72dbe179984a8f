"""What a chart is: plain values in the form that plotly.js draws. Pure: no torch, no plotly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

COLORS = ("#3b82f6", "#f97316", "#0f9d6e", "#a855f7", "#ef4444", "#06b6d4", "#ec4899", "#a3a30b")
"""Told apart, and readable, on white and on black."""
MORE_COLORS = (
    "#1e40af",
    "#fbbf24",
    "#7c2d12",
    "#84cc16",
    "#f9a8d4",
    "#0f766e",
    "#6b21a8",
    "#c2b280",
)
DASHES = ("solid", "dash", "dot", "dashdot")

FEW_POINTS = 60
"""Up to so many points of a curve each has a dot."""


@dataclass(frozen=True)
class Figure:
    """One chart. `traces` and `layout` are those of plotly.js.

    `by_step`: the horizontal axis is the step, or the tokens in the traces' `meta`.
    `logarithmic`: the page's switch to a logarithmic vertical axis applies.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    caption: str = ""
    by_step: bool = False
    logarithmic: bool = False

    def values(self) -> dict[str, Any]:
        """For the page's script."""
        return dict(vars(self))


def text(value: str) -> str:
    """Text as it is, for where plotly.js would read tags."""
    return escape(value, quote=False)


def run_color(index: int) -> str:
    """The colour of a run in every chart."""
    return COLORS[index % len(COLORS)]


def run_dash(index: int) -> str:
    """Tells runs apart that have the same colour."""
    return DASHES[index // len(COLORS) % len(DASHES)]


LEGEND_ABOVE = {
    "showlegend": True,
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
}
"""Layout of a chart whose traces need naming; beside it there is no room on a narrow screen."""


def phase_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for each phase, the same on the whole page; the first names get the clearest."""
    fixed = {"forward": COLORS[0], "backward": COLORS[2], "other": "#9ca3af"}
    free = [color for color in (*COLORS, *MORE_COLORS) if color not in fixed.values()]
    rest = [name for name in dict.fromkeys(names) if name not in fixed]
    return fixed | {name: free[index % len(free)] for index, name in enumerate(rest)}
