"""Real jobs in which a rank fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_fault_test_in_short(tmp_path: Path) -> None:
    """A rank leaves too early, one hangs and the job recovers: see scripts/fault_test.py."""
    short = ["--rounds", "1", "--kinds", "exit", "hang", "--layouts", "dp2zero2"]
    short += ["--timeout", "20", "--directory", str(tmp_path)]
    command = [sys.executable, str(ROOT / "scripts/fault_test.py"), *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rounds: every job ended or recovered in time" in done.stdout
