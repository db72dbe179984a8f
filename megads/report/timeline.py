"""The pipeline timeline of a profiled step, and the one that its schedule would have. Pure.

A step's file for each rank, `profile/step-N/rank-R.json`, holds the spans of its phases in seconds
from a start that all ranks share. The simulated timeline has the run's schedule, stages, chunks and
microbatches; a forward and a backward of each virtual stage take their measured medians, messages
no time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megads.errors import MegadsError
from megads.pipeline.schedule import build_schedule, send_window
from megads.pipeline.simulate import simulate

PASSES = {"forward": "F", "backward": "B"}
"""Phases that are computations of the schedule, and what it calls them."""


class Span(NamedTuple):
    """One phase of a rank, in seconds; passes have a chunk and a microbatch."""

    name: str
    start: float
    end: float
    chunk: int | None = None
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Spans of each stage, by stage."""

    rows: Mapping[int, Sequence[Span]]

    def passes(self) -> list[tuple[int, Span]]:
        """Forward and backward passes, each with its stage."""
        return [(row, s) for row, spans in self.rows.items() for s in spans if s.name in PASSES]

    @property
    def bounds(self) -> tuple[float, float]:
        """Start of the first pass and end of the last, in seconds; zeros if there is none."""
        spans = [span for _, span in self.passes()]
        return min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the stages' time, from the first pass to the last, that is in no pass."""
        start, end = self.bounds
        busy = sum(span.seconds for _, span in self.passes())
        return 1 - busy / ((end - start) * len(self.rows)) if end > start else 0.0


@dataclass(frozen=True)
class ProfiledStep:
    """One step at one data and tensor parallel position: all of its pipeline stages.

    `simulated` is None where there is nothing to compare with; `reason` says why.
    """

    step: int
    dp: int
    tp: int
    measured: Timeline
    simulated: Timeline | None = None
    reason: str = ""


def read_profile(
    run_dir: Path, config_at: Callable[[int], Mapping[str, object]], problems: list[str]
) -> list[ProfiledStep]:
    """Every profiled step at every position, in order; adds unreadable files to `problems`.

    `config_at`: the configuration of a step, by dotted key.
    """
    rows: dict[tuple[int, int, int], dict[int, list[Span]]] = {}
    for path in sorted((run_dir / "profile").glob("step-*/rank-*.json")):
        if not re.fullmatch(r"rank-\d+\.json", path.name):  # traces of torch.profiler lie beside
            continue
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            at = trace["coords"]
            key = (int(trace["step"]), int(at["dp"]), int(at["tp"]))
            rows.setdefault(key, {})[int(at["pp"])] = [_span(s) for s in trace["spans"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: left out: {type(error).__name__}: {error}")
    return [
        _compared(key, Timeline(dict(sorted(stages.items()))), config_at(key[0]))
        for key, stages in sorted(rows.items())
    ]


def simulated(measured: Timeline, schedule: str, num_stages: int, chunks: int) -> Timeline:
    """What the schedule gives with the measured medians, starting where the measured one does.

    Raises ScheduleError or ConfigError when there is no such schedule, ValueError saying what is
    missing from the measured passes.
    """
    if list(measured.rows) != list(range(num_stages)):
        raise ValueError(f"files of stages {list(measured.rows)}, parallel.pp={num_stages}")
    durations: dict[tuple[str, int, int], list[float]] = {}
    for stage, span in measured.passes():
        if span.chunk is None or span.microbatch is None:
            raise ValueError("a pass without chunk or microbatch")
        durations.setdefault((span.name, stage, span.chunk), []).append(span.seconds)
    microbatches = max((len(found) for found in durations.values()), default=0)
    costs: dict[str, list[float]] = {name: [] for name in PASSES}
    for virtual in range(num_stages * chunks):
        chunk, stage = divmod(virtual, num_stages)
        for name in PASSES:
            found = durations.get((name, stage, chunk), [])
            if len(found) != microbatches or not found:
                where = f"stage {stage}" + (f", chunk {chunk}" if chunks > 1 else "")
                raise ValueError(f"{where}: {len(found)} {name} passes of {microbatches}")
            costs[name].append(median(found))
    report = simulate(
        build_schedule(schedule, num_stages, chunks, microbatches),
        chunks,
        microbatches,
        forward_costs=costs["forward"],
        backward_costs=costs["backward"],
        send_window=send_window(num_stages, microbatches),
    )
    origin, names = measured.bounds[0], {op: name for name, op in PASSES.items()}
    return Timeline(
        {
            stage: [
                Span(names[a.op], origin + start, origin + end, a.chunk, a.microbatch)
                for a, start, end in spans
            ]
            for stage, spans in enumerate(report.timeline)
        }
    )


def _compared(
    key: tuple[int, int, int], measured: Timeline, config: Mapping[str, object]
) -> ProfiledStep:
    try:
        sizes = [config["parallel.pp"], config["parallel.chunks"]]
        num_stages, chunks = (int(str(size)) for size in sizes)
        schedule = str(config.get("parallel.schedule", "auto"))
        return ProfiledStep(*key, measured, simulated(measured, schedule, num_stages, chunks))
    except KeyError as error:
        return ProfiledStep(*key, measured, reason=f"the configuration has no {error.args[0]}")
    except (MegadsError, ValueError) as error:
        return ProfiledStep(*key, measured, reason=str(error))


def _span(values: Mapping[str, Any]) -> Span:
    start, end = float(values["start_s"]), float(values["end_s"])
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"a span from {start} to {end}")
    where = [int(values[key]) if key in values else None for key in ("chunk", "microbatch")]
    return Span(str(values["name"]), start, end, *where)


def span_names(spans: Iterable[Span]) -> list[str]:
    """Names of phases: the passes, then the others by the time spent in them."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    others = sorted(seconds.keys() - PASSES.keys(), key=lambda name: -seconds[name])
    return [*(name for name in PASSES if name in seconds), *others]
