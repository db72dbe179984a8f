"""The page in Chromium, where there is one: no script errors, everything drawn, switches work."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megads.report.page import build_page
from megads.report.runs import read_runs
from tests.report.browser import open_page
from tests.report.made_up import config, step_line, write_profile, write_run

STEPS = 30
NASTY = "<img src=x onerror=boom()>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    """Two runs, the second with a NaN in step 2 and a name made of tags; two profiled steps."""
    library = pytest.importorskip("plotly.offline", reason="needs plotly").get_plotlyjs()
    rng = random.Random(0)
    lines = [step_line(s, rng) for s in range(1, STEPS + 1)]
    lines[1]["loss"] = float("nan")
    runs = [
        write_run(folder / "plain", steps=50),
        write_run(
            folder / NASTY, lines, config(parallel__pp=3, run__dir="x", train__note="x" * 200)
        ),
    ]
    write_profile(runs[0], microbatches=8)
    write_profile(runs[1], pp=3, microbatches=4)
    return build_page(read_runs(runs), library)


def test_everything_is_drawn_and_every_switch_works(
    page: str, folder: Path, tmp_path: Path
) -> None:
    def spans(run: str) -> int:
        files = (folder / run / "profile/step-5").iterdir()
        return sum(len(json.loads(file.read_text())["spans"]) for file in files)

    told = open_page(page, tmp_path)
    assert told["failure"] == "" and told["invalid"] == []
    charts = told["charts"]
    curves = [chart for chart in charts if chart["section"] == "curves"]
    # A curve per run, two for utilisation and waiting; validation is of one run and two sources.
    assert [chart["lines"] for chart in curves] == [2, 3, 2, 2, 2, 4, 2, 4, 2]
    assert curves[0]["marks"] == 50 + (STEPS - 1) + 1  # and a cross for the NaN
    others = [(c["section"], c["bars"], c["areas"], c["images"]) for c in charts if c not in curves]
    # Four kinds of memory and three phases of two runs; every span, and simulated passes.
    assert others == [
        ("memory", 8, 0, 0),
        ("phases", 6, 0, 0),
        ("phases", 0, 3, 0),
        ("phases", 0, 3, 0),
        ("ranks", 0, 0, 1),
        ("ranks", 0, 0, 1),
        ("timelines", spans("plain") + 2 * 16, 0, 0),
    ]
    assert all(chart["height"] > 150 and chart["width"] > 300 for chart in charts)
    assert told["visible"] == [True, False, False]
    assert told["axisTitle"] == "tokens"
    tokens = [4096 * step for step in range(1, STEPS + 1)]
    assert told["tokens"][1] == tokens[:1] + tokens[2:] and told["tokens"][2] == [tokens[1]]
    assert told["logarithmic"] == [True, True, True] + [False] * (len(charts) - 3)
    assert told["timeline"] == [spans("plain") + 2 * 16, spans(NASTY) + 3 * 8]
    # Three stages: 20 ms until the last starts, its 4 x 45, and 40 until the first has ended.
    assert told["caption"].startswith(
        "Measured: 240.0 ms, bubble 41.7%. Simulated: 240.0 ms, bubble 41.7%."
    )
    assert told["overflow"] <= 0


def test_a_narrow_window_in_the_dark(page: str, tmp_path: Path) -> None:
    told = open_page(page, tmp_path, size="500,900", dark=True)
    assert told["failure"] == ""
    assert told["overflow"] <= 0
    assert (told["background"], told["ink"]) == ("rgb(17, 20, 24)", "rgb(229, 231, 235)")
    assert all(200 < chart["width"] < 500 for chart in told["charts"])


def test_errors_and_requests_would_be_noticed(tmp_path: Path) -> None:
    """A library that fails, and an image from elsewhere, in a page without charts."""
    page = build_page(read_runs([write_run(tmp_path / "new", [])]), "throw new Error('broken')")
    told = open_page(page.replace("</body>", "<img src=http://x.test/a></body>"), tmp_path)
    assert "Error: broken" in told["failure"]
    assert "refused to load http://x.test/a" in told["failure"]
