"""Medians over runs and the table of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median

from contenders import MEGADS
from runs import Run


@dataclass(frozen=True)
class Line:
    """Medians of one contender in one row. `ratio` and `memory_ratio`: to the best eager peer."""

    row: str
    dtype: str
    contender: str
    step_s: float
    fastest_s: float
    steps: int
    step_peak_mb: float
    peak_mb: float
    eager: bool = field(kw_only=True)
    clean: bool = field(kw_only=True)
    ratio: float | None = None
    memory_ratio: float | None = None
    note: str = ""


def summarize(runs: list[Run], warmup: int) -> list[Line]:
    """A line per contender, in the order of the first runs, with ratios to the best eager peer."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        group = groups.setdefault((run.row, run.dtype, run.contender), [])
        if not run.problem:
            group.append(run)
    lines = [_line(group, warmup) for group in groups.values() if group]
    result = []
    for line in lines:
        rivals = [
            other
            for other in lines
            if (other.row, other.dtype) == (line.row, line.dtype)
            and other.contender != MEGADS
            and other.eager
        ]
        if rivals:
            best = min(rivals, key=lambda other: other.step_s)
            ratios = {"ratio": line.step_s / best.step_s}
            ratios["memory_ratio"] = line.step_peak_mb / best.step_peak_mb
            line = Line(**(asdict(line) | ratios))
        result.append(line)
    return sorted(result, key=lambda line: (line.row, line.dtype, line.step_s))


def _line(runs: list[Run], warmup: int) -> Line:
    """Medians over the clean steps of all runs; over all steps, marked so, when none is clean."""
    clean = [seconds for run in runs for seconds in run.clean_steps(warmup)]
    times = clean or [seconds for run in runs for seconds in run.step_s[warmup:]]
    seen = [seconds for run in runs for seconds in run.seen_step_s[warmup:]]
    reported = [seconds for run in runs for seconds in run.step_s[warmup:]]
    note = ""
    if seen and median(seen) > 1.03 * median(reported):
        note = f"{median(seen):.3f} s from line to line of metrics.jsonl"
    first = runs[0]
    return Line(
        first.row,
        first.dtype,
        first.contender,
        median(times),
        min(times),
        len(times),
        median(max(run.step_peak_mb, default=0.0) for run in runs),
        median(max(run.peak_mb, default=0.0) for run in runs),
        eager=first.eager,
        clean=bool(clean),
        note=note,
    )


def table(lines: list[Line]) -> str:
    """The lines as text; peak memory is that of the largest rank, in MiB."""
    text = [
        f"{'row':8s} {'dtype':5s} {'contender':18s} {'s/step':>8s} {'fastest':>8s} {'steps':>6s} "
        f"{'x best':>7s} {'peak':>8s} {'x best':>7s} {'w/ start':>8s}"
    ]
    for line in lines:
        text.append(
            f"{line.row:8s} {line.dtype:5s} {line.contender:18s} {line.step_s:8.3f} "
            f"{line.fastest_s:8.3f} {line.steps:5d}{' ' if line.clean else '!'} "
            f"{_ratio(line.ratio)} {line.step_peak_mb:8.0f} {_ratio(line.memory_ratio)} "
            f"{line.peak_mb:8.0f}{'' if line.eager else '  compiled'}  {line.note}"
        )
    text.append("x best: to the fastest eager peer of the row.  !: no clean step, all steps taken.")
    return "\n".join(text)


def _ratio(value: float | None) -> str:
    return " " * 7 if value is None else f"{value:7.3f}"
