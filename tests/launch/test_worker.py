"""Who reports a failure, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MegadsError,
    Teller,
    told_by,
)
from megads.launch.env import Started
from megads.launch.worker import failed


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def of(teller: Teller, error: MegadsError) -> BaseException:
    def met() -> None:
        with told_by(teller):
            raise error

    with pytest.raises(MegadsError) as caught:
        met()
    return caught.value


@pytest.mark.parametrize(
    ("error", "status", "speakers"),
    [
        (of("job", ConfigError("a")), 2, [0]),
        (of("machine", DataError("a")), 2, [0, 2]),
        (of("rank", DataError("a")), 2, [0, 1, 2, 3]),
        (LayoutError("a"), 2, [0, 1, 2, 3]),
        (CheckpointError("a"), 1, [0, 1, 2, 3]),
        (ValueError("a"), 1, [0, 1, 2, 3]),
        (SystemExit(7), 7, [0, 1, 2, 3]),
    ],
)
def test_status_and_speakers(error: BaseException, status: int, speakers: list[int]) -> None:
    places = [Started(rank, rank % 2) for rank in range(4)]  # Two machines with two ranks each.
    ends = [failed(place, _raised(error)) for place in places]
    assert [end[0] for end in ends] == [status] * 4
    assert [rank for rank, end in enumerate(ends) if end[1] is not None] == speakers


def test_tracebacks_are_for_faults_of_the_program() -> None:
    place = Started(3, 1)
    assert failed(place, _raised(CheckpointError("step-3 is damaged")))[1] == (
        "rank 3: step-3 is damaged"
    )
    text = failed(place, _raised(ValueError("odd")))[1]
    assert text is not None
    assert text.startswith("rank 3: Traceback") and text.endswith("ValueError: odd")


def test_workers_of_the_local_launcher_write_instead_of_speaking(tmp_path: Path) -> None:
    place = Started(0, 0, launcher_pid=1, error_file=tmp_path / "error.json")
    assert failed(place, _raised(ValueError("odd"))) == (1, None)
    details = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert details["py_callstack"].endswith("ValueError: odd")
    assert int(details["timestamp"]) == int(details["time"])
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
