"""`megads-report` as users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megads.cli.report import main
from tests.report.made_up import write_profile, write_run


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the packages of megads[report]")
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    write_profile(runs[0])
    command = Path(sys.executable).with_name("megads-report")
    done = subprocess.run(
        [command, "first", "second"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote report.html\n", "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "first, step 5, dp 0, tp 0" in page and len(page) > 1_000_000  # with the library


def test_what_cannot_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="needs the packages of megads[report]")
    output = ["--output", str(tmp_path / "report.html")]
    assert main([str(tmp_path), *output]) == 2
    assert f"megads-report: {tmp_path}: no metrics.jsonl there" in capsys.readouterr().err
    run = write_run(tmp_path / "run", steps=1)
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--output", str(tmp_path / "none" / "report.html")])
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--output", str(tmp_path)])
    assert f"{tmp_path} is a folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main([str(run), *output]) == 2
    assert "the report needs the package plotly: pip install 'megads[report]'" in (
        capsys.readouterr().err
    )
