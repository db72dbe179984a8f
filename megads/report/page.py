"""One HTML page from runs. It loads nothing: script, style and numbers are inside. Pure: no torch.

All text from runs is escaped. The page's policy forbids every request, also to what text in it
might smuggle in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from megads.report.curves import curve_figures
from megads.report.figures import Figure, phase_colors, run_color
from megads.report.runs import Run
from megads.report.tables import Table, changes, differences, summary
from megads.report.timeline import read_profile, span_names
from megads.report.timeline_figure import MAX_TIMELINES, timeline_figures
from megads.report.usage import memory_figure, phase_figures, phase_names, rank_figure

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def build_page(runs: Sequence[Run], plotly_js: str) -> str:
    """The whole page. `plotly_js`: the library's own script."""
    problems = [problem for run in runs for problem in run.problems]
    profiles = [(r, p) for r in runs for p in read_profile(r.path, r.config_at, problems)]
    spans = [s for _, p in profiles for row in p.measured.rows.values() for s in row]
    colors = phase_colors([*phase_names(runs), *span_names(spans)])
    timelines = timeline_figures(profiles, colors)
    memory = memory_figure(runs)
    ranks = [f for run in runs if (f := rank_figure(run))]
    sections = {
        "curves": ("Curves", curve_figures(runs)),
        "memory": ("Memory", [memory] if memory else []),
        "phases": ("Where the time goes", phase_figures(runs, colors)),
        "ranks": ("Ranks", ranks),
        "timelines": ("Pipeline timeline", timelines),
    }
    tables = [summary(runs), differences(runs), *map(changes, runs)]
    left_out = len(profiles) - len(timelines)
    if left_out:
        problems.append(f"{left_out} timelines left out; the page holds {MAX_TIMELINES}")
    figures = {key: [f.values() for f in found] for key, (_, found) in sections.items()}
    return _PAGE.format(
        policy=escape(POLICY),
        title=escape(", ".join(run.name for run in runs)),
        style=_resource("page.css"),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        runs="".join(_run_button(index, run) for index, run in enumerate(runs)),
        problems="".join(f"<p class=problem>{escape(problem)}</p>" for problem in problems),
        tables="".join(_table(table) for table in tables if table),
        sections="".join(_section(key, *section) for key, section in sections.items()),
        figures=_json(figures),
        library=plotly_js,
        script=_resource("page.js"),
    )


def _run_button(index: int, run: Run) -> str:
    return (
        f"<button type=button class=run data-run={index} aria-pressed=true "
        f'title="{escape(str(run.path))}"><i style="background:{run_color(index)}"></i>'
        f"{escape(run.name)}</button>"
    )


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return (
        f"<h2>{escape(table.title)}</h2><div class=wide><table><thead>"
        f"{row(table.header, 'th')}</thead><tbody>{body}</tbody></table></div>"
    )


def _section(key: str, title: str, figures: Sequence[Figure]) -> str:
    """The places of a section's charts, which the script fills by their number."""
    if not figures:
        return ""
    if key == "timelines":
        options = "".join(
            f"<option value={index}>{escape(figure.title)}</option>"
            for index, figure in enumerate(figures)
        )
        inside = (
            f"<p><select id=timeline aria-label=step>{options}</select></p>"
            "<figure><div class=chart data-section=timelines data-index=0></div>"
            "<figcaption></figcaption></figure>"
        )
        return f"<h2>{escape(title)}</h2>{inside}"
    switches = _SWITCHES if key == "curves" else ""
    charts = "".join(
        f"<figure><h3>{escape(figure.title)}</h3>"
        f"<div class=chart data-section={key} data-index={index}></div>"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        for index, figure in enumerate(figures)
    )
    return f"<h2>{escape(title)}</h2>{switches}<div class=charts>{charts}</div>"


def _json(values: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(values, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("megads.report").joinpath(name).read_text(encoding="utf-8")


_SWITCHES = (
    "<p class=switches><label>against <select id=axis><option value=step>steps</option>"
    "<option value=tokens>tokens</option></select></label> "
    "<label><input type=checkbox id=logarithmic> logarithmic losses and norms</label></p>"
)

_PAGE = """<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="{policy}">
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<title>megads report: {title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>megads report</h1><p>{made}</p><nav>{runs}</nav></header>
<main>
<p id=failure class=problem hidden></p>
<noscript><p class=problem>The charts need JavaScript.</p></noscript>
{problems}{tables}{sections}
</main>
<script type=application/json id=figures>{figures}</script>
<script>{script}</script>
<script>{library}</script>
</body>
</html>
"""
