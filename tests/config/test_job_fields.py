"""Time limits as SLURM writes them, and the traps in writing them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megads.config.compose import compose
from megads.config.job_fields import job_seconds
from megads.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [  # the formats that sbatch's manual lists
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("24:00:00", 24 * 3600),
        ("1:2:3", 3723),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("1-00:00:01", 86401),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("", None),
        ("3h", None),
        ("1:2:3:4", None),
        ("1-", None),
        ("-1", None),
        ("24:00:00\n", None),
    ],
)
def test_job_seconds(text: str, seconds: float | None) -> None:
    assert job_seconds(text) == seconds


def test_times_on_the_command_line() -> None:
    assert compose(["launch.slurm.time=1-12:00:00"]).launch.slurm.time == "1-12:00:00"
    for value in ("3h", "0:00", "soon"):
        with pytest.raises(ConfigError, match=f"^launch.slurm.time: {value} is no time; write"):
            compose([f"launch.slurm.time={value}"])


def test_a_time_that_yaml_reads_as_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    file = tmp_path / "launch/mine.yaml"
    words = [f"--config-dir={tmp_path}", "launch=mine"]
    file.write_text("slurm:\n  time: 24:00:00\n")  # sbatch would be asked for 86400 minutes
    with pytest.raises(ConfigError, match=r"time: 86400 is a bare number; .* '24:00:00'"):
        compose(words)
    file.write_text("slurm:\n  time: '24:00:00'\n")
    assert compose(words).launch.slurm.time == "24:00:00"


@pytest.mark.parametrize(
    "word", ["launch.slurm.partition=''", 'launch.slurm.setup=["a\nb"]', "launch.slurm.account=' '"]
)
def test_what_would_be_several_lines_or_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="must be one line of text"):
        compose([word])
