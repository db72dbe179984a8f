"""The page itself: it asks for nothing, escapes what it shows, and its charts are valid."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megads.report.page import POLICY, build_page
from megads.report.runs import read_runs
from tests.report.made_up import config, step_line, write_profile, write_run

LIBRARY = "/* the library's script */"
NASTY = """"><img src=x onerror=boom()>& '<b>"""
NASTY_SETTING = "</script><!--<script>" + NASTY


class Parts(HTMLParser):
    """Start tags with their attributes, and the text of each element by its tag and id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[tuple[str, str | None], str] = {}
        self._at: tuple[str, str | None] = ("", None)
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._at = (tag, dict(attrs).get("id"))

    def handle_data(self, data: str) -> None:
        self.text[self._at] = self.text.get(self._at, "") + data


def figures_of(page: str) -> dict[str, list[dict[str, Any]]]:
    figures: dict[str, list[dict[str, Any]]] = json.loads(Parts(page).text["script", "figures"])
    return figures


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two runs, one of which has names and settings that no page should run."""
    folder = tmp_path_factory.mktemp("runs")
    good = write_run(folder / "good")
    rng = random.Random(0)
    lines = [
        step_line(
            s, rng, phases_s={NASTY: 1.0}, host_bytes=1 << 30, loss=float("nan") if s == 2 else 1
        )
        for s in range(1, 4)
    ]
    nasty = write_run(folder / NASTY, lines, config(parallel__schedule=NASTY_SETTING) | {NASTY: 1})
    (nasty / "config.before-step-2.yaml").write_text("[")
    for run in (good, nasty):
        write_profile(run)
    return build_page(read_runs([good, nasty]), LIBRARY)


def outside_addresses(page: str) -> list[str]:
    """What a browser would fetch: attributes that name something, and CSS that does."""
    parts = Parts(page)
    naming = ("src", "href", "srcset", "data", "action", "poster", "background", "formaction")
    found = [a[name] or "" for _, a in parts.tags for name in naming if name in a]
    style = "".join(t for (tag, _), t in parts.text.items() if tag == "style")
    style += "".join(a.get("style") or "" for _, a in parts.tags)
    return found + re.findall(r"url\([^)]*\)|@import[^;]*", style)


def test_the_page_asks_for_nothing(page: str) -> None:
    assert outside_addresses(page) == []
    policy = {"http-equiv": "Content-Security-Policy", "content": POLICY}
    assert ("meta", policy) in Parts(page).tags
    assert POLICY.startswith("default-src 'none'") and "http" not in POLICY


@pytest.mark.parametrize(
    "added",
    ["<script src='https://x.test/a.js'></script>", "<a href=//x.test>x</a>",
     "<style>@import 'x.css';</style>", "<p style='background:url(x.png)'>"],
)  # fmt: skip
def test_asking_for_something_would_be_noticed(page: str, added: str) -> None:
    assert len(outside_addresses(page.replace("</main>", f"{added}</main>"))) == 1


def test_text_of_runs_stays_text(page: str) -> None:
    """No element or attribute comes from it, and what a reader sees is what it was."""
    parts = Parts(page)
    assert not [tag for tag, _ in parts.tags if tag in ("img", "b")]
    assert not [attrs for _, attrs in parts.tags if "onerror" in attrs]
    assert [attrs.get("id") for tag, attrs in parts.tags if tag == "script"] == [
        "figures",
        None,
        None,
    ]
    assert NASTY in parts.text["th", None] and NASTY in parts.text["td", None]
    assert "config.before-step-2.yaml" in parts.text["p", None]
    reason = f"parallel.schedule={NASTY_SETTING} is unknown"
    assert reason in figures_of(page)["timelines"][1]["caption"]


def test_every_chart_has_its_place_and_its_figure(page: str) -> None:
    figures = figures_of(page)
    places = [
        (attrs["data-section"], int(attrs["data-index"] or 0))
        for _, attrs in Parts(page).tags
        if attrs.get("class") == "chart"
    ]
    assert sorted(places) == sorted(
        (section, index)
        for section, found in figures.items()
        for index in (range(len(found)) if section != "timelines" else [0])
    )
    assert [len(found) for found in figures.values()] == [9, 1, 3, 1, 2]
    assert LIBRARY in page


def test_the_library_knows_every_property(page: str) -> None:
    """plotly's own classes refuse a property or a value that plotly.js does not have."""
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs plotly")
    for found in figures_of(page).values():
        for figure in found:
            graph_objects.Figure(figure["traces"], figure["layout"])
    with pytest.raises(ValueError, match="bar"):
        graph_objects.Figure([{"type": "bar", "barcolor": "red"}])


def test_a_page_of_a_run_that_has_not_made_a_step(tmp_path: Path) -> None:
    page = build_page(read_runs([write_run(tmp_path / "new", [])]), LIBRARY)
    assert all(found == [] for found in figures_of(page).values())
    assert "step 0 of 200" in Parts(page).text["td", None]
