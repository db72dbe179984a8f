"""Times of steps, by phase and rank, and the timelines of profiled ones."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megads.config.compose import compose
from megads.parallel.layout import ParallelLayout
from megads.pipeline.schedule import build_schedule
from megads.train.timing import StepTimer, slow_ranks
from tests.distributed import Workers, mesh_for
from tests.training import run_training, tiny_config, write_tokens


@pytest.mark.parametrize(
    ("times", "stages", "found"),
    [
        ([1.0, 1.0, 1.0, 1.31], [0, 0, 0, 0], [(3, 1.0)]),
        ([1.0, 1.0, 1.0, 1.29], [0, 0, 0, 0], []),
        # The second stage has more to do, all of its ranks alike: nobody is slow.
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [0, 0, 0, 1, 1, 1], []),
        ([1.0, 1.0, 1.0, 2.0, 3.0, 2.0], [0, 0, 0, 1, 1, 1], [(4, 2.0)]),
        # Of two ranks, too; and two stages of two are no reason to take the second for slow.
        ([1.0, 1.31], [0, 0], [(1, 1.0)]),
        ([1.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], []),
        # Alone in its stage, a rank is compared with all.
        ([1.0, 1.0, 4.0, 1.0], [0, 1, 2, 3], [(2, 1.0)]),
        ([0.2], [0], []),
    ],
)
def test_slow_ranks(times: list[float], stages: list[int], found: list[tuple[int, float]]) -> None:
    assert slow_ranks(times, stages, 1.3) == found


def compared(rank: int, world: int, slow: int, folder: Path) -> tuple[Any, list[str]]:
    mesh = mesh_for(ParallelLayout(tp=2, dp=2), rank)
    timer = StepTimer(compose([]).logging, mesh, folder, None)
    for number in range(2):
        with timer.step(number + 1):
            time.sleep(0.3 if rank == slow else 0.05)
            with mesh.phases.waiting("the others"):
                time.sleep(0.0 if rank == slow else 0.25)
    notes = timer.compare_ranks()
    times = timer.taken()["rank_times_s"]
    assert "rank_times_s" not in timer.taken(), "told of once"
    return times, notes


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path, workers: Workers) -> None:
    for times, notes in workers(4).run(compared, 2, tmp_path):
        assert 0.05 <= times[0] < 0.25 <= times[2]
        assert len(notes) == 1 and notes[0].startswith("rank 2 (pp 0, dp 1, tp 0, on ")
    assert workers(4).run(compared, 9, tmp_path)[0][1] == []


def test_a_run_reports_its_phases_and_profiles_steps(tmp_path: Path, workers: Workers) -> None:
    words = [
        "train.steps=4",
        "train.micro_batch_size=2",
        "logging.profile_steps=[3]",
        "logging.profile_ranks=[1]",
        "logging.ranks_every=3",
        "logging.every=2",
    ]
    tokens = write_tokens(tmp_path / "tokens")
    config = tiny_config(tmp_path / "run", tokens, "gpt", "parallel=pp2", *words)
    # Of an earlier start, which had more ranks.
    (tmp_path / "run/profile/step-3").mkdir(parents=True)
    (tmp_path / "run/profile/step-3/rank-3.json").touch()
    lines = run_training(workers, config)
    for line in lines:
        phases = line["phases_s"]
        assert {"data", "forward", "backward", "receive", "optimizer"} <= set(phases)
        assert sum(phases.values()) == pytest.approx(line["step_time_s"], rel=0.05, abs=2e-3)
        assert all(seconds >= 0 for seconds in phases.values())
    # Step 3, which is not logged, compared the ranks.
    assert [line["step"] for line in lines] == [2, 4]
    assert [len(line.get("rank_times_s", [])) for line in lines] == [0, 2]
    folder = tmp_path / "run" / "profile"
    assert [p.name for p in folder.iterdir()] == ["step-3"]
    names = {"rank-0.json", "rank-1.json", "rank-1.trace.json"}
    assert {p.name for p in (folder / "step-3").iterdir()} == names
    assert json.loads((folder / "step-3" / "rank-1.trace.json").read_text())["traceEvents"]
    for rank in range(2):
        timeline = json.loads((folder / "step-3" / f"rank-{rank}.json").read_text())
        assert (timeline["step"], timeline["rank"]) == (3, rank)
        assert timeline["coords"] == {"pp": rank, "dp": 0, "tp": 0}
        check_timeline(timeline, rank)


def check_timeline(timeline: dict[str, Any], stage: int) -> None:
    """The passes come as the schedule has them, one after the other, inside the step."""
    spans = timeline["spans"]
    letters = {"forward": "F", "backward": "B"}
    passes = [s for s in spans if s["name"] in letters]
    want = [a for a in build_schedule("1f1b", 2, 1, 4)[stage] if a.op in "FB"]
    got = [(letters[s["name"]], s["chunk"], s["microbatch"]) for s in passes]
    assert got == [(a.op, a.chunk, a.microbatch) for a in want]
    ends = [0.0] + [s["end_s"] for s in passes]
    assert all(s["start_s"] >= end for s, end in zip(passes, ends, strict=False))
    assert all(0 <= s["start_s"] <= s["end_s"] <= timeline["seconds"] for s in spans)
