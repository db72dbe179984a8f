"""What a person sees of a run: a line that is redrawn on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megads.train.display import LiveDisplay, PlainDisplay
from megads.train.metrics import Metrics

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def values(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.34567,
        "grad_norm": 1.23456,
        "lr": 3e-4,
        "tokens_per_second": 12_345.6,
        "step_time_s": 2.0,
        "mfu": None,
        "skipped": 0,
    } | changes


def terminal(width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(force_terminal=True, file=out, width=width, height=25), out


def screen(text: str) -> list[str]:
    """The lines left on a terminal: carriage return, line feed, cursor up and erase line only."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(text):
        escape = ESCAPE.match(text, position)
        if escape:
            code = escape.group()
            count = int(code[2:-1] or 1) if code[2:-1].isdigit() or not code[2:-1] else 1
            if code.endswith("A"):
                row = max(0, row - count)
            elif code.endswith("K"):
                lines[row] = ""
            position = escape.end()
            continue
        char = text[position]
        if char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif char == "\r":
            column = 0
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + char + line[column + 1 :]
            column += 1
        position += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_the_live_line_is_redrawn_in_place() -> None:
    console, out = terminal()
    display = LiveDisplay(console)
    for step in range(1, 4):
        display.step(values(step, loss=10.0 / step), total_steps=10)
    display.close()
    (line,) = screen(out.getvalue())
    assert line.split()[:2] == ["step", "3/10"]
    assert "loss 3.3333" in line and "grad norm 1.235" in line and "lr 0.0003" in line
    assert "12.3k tokens/s" in line
    assert "mfu" not in line and "skipped" not in line


def test_eighty_columns_are_enough_for_one_line() -> None:
    console, out = terminal(width=80)
    display = LiveDisplay(console)
    for step in range(1, 4):
        display.step(values(step), total_steps=100_000)
    display.close()
    (line,) = screen(out.getvalue())
    assert "3/100000" in line and "loss 2.3457" in line and "tokens/s" in line


def test_optional_parts_are_shown_when_there_is_something_to_say() -> None:
    console, out = terminal(width=160)
    display = LiveDisplay(console)
    display.step(values(1, mfu=0.4321, skipped=3), total_steps=2)
    display.close()
    (line,) = screen(out.getvalue())
    assert "mfu 43.2%" in line and "skipped 3" in line


def test_a_resumed_run_starts_where_it_is() -> None:
    console, out = terminal()
    display = LiveDisplay(console)
    display.step(values(701), total_steps=1000)
    display.close()
    (line,) = screen(out.getvalue())
    assert "701/1000" in line


def test_notes_stay_above_the_line_and_are_not_markup() -> None:
    console, out = terminal()
    display = LiveDisplay(console)
    display.note("before the first step")
    display.step(values(1), total_steps=10)
    display.note("a list [1, 2] and [red]brackets[/red]")
    display.step(values(2), total_steps=10)
    display.close()
    lines = screen(out.getvalue())
    assert lines[:2] == ["before the first step", "a list [1, 2] and [red]brackets[/red]"]
    assert len(lines) == 3 and "2/10" in lines[2]


@pytest.mark.parametrize("steps", [0, 1])
def test_the_cursor_comes_back(steps: int) -> None:
    """Also after a run that failed before its first step; closing twice does no harm."""
    console, out = terminal()
    display = LiveDisplay(console)
    for step in range(steps):
        display.step(values(step + 1), total_steps=3)
    display.close()
    display.close()
    text = out.getvalue()
    assert text.rfind(SHOW_CURSOR) >= text.rfind(HIDE_CURSOR)
    assert (HIDE_CURSOR in text) == (steps > 0)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_shown(loss: float) -> None:
    console, out = terminal()
    display = LiveDisplay(console)
    display.step(values(1, loss=loss, grad_norm=loss), total_steps=3)
    display.close()
    assert f"loss {loss}" in screen(out.getvalue())[0]


def test_plain_lines_for_files_and_pipes() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 2.0)):
        display.step(values(step, step_time_s=seconds), total_steps=3603)
    display.note("[bold]" + "x" * 100)
    lines = out.getvalue().splitlines()
    assert ESCAPE.search(out.getvalue()) is None
    assert [line.split("  ")[0] for line in lines[:3]] == [f"step {i}/3603" for i in (1, 2, 3)]
    assert lines[2].endswith("eta 2:00:00"), "the slow first step is an outlier"
    assert lines[3] == "[bold]" + "x" * 100, "not wrapped"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, redraws", [(Screen(), True), (io.StringIO(), False)])
def test_the_kind_of_output_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, redraws: bool
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream)
    metrics = Metrics(tmp_path)
    metrics.step(values(1), total_steps=3)
    metrics.evaluation(1, 2.0)
    metrics.close(0)
    assert (HIDE_CURSOR in stream.getvalue()) == redraws
    assert "validation at step 1: loss 2.0000  perplexity 7.39" in stream.getvalue()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(None)
    metrics.rewind(0)
    metrics.step(values(1), total_steps=3)
    metrics.evaluation(1, 2.0)
    metrics.note("hello")
    metrics.close(0)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
