"""What a run left in its directory, read for a report. Pure: no torch.

Anything may be missing or damaged: an old run lacks newer keys, one that still goes has a last line
that is not finished, and a failing disk spoils others. What could be read is used, and
`Run.problems` says what could not.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from megads.checkpoint.directory import committed_steps
from megads.errors import DataError
from megads.launch.activity import activity_file, read_activity

METRICS = "metrics.jsonl"
Line = Mapping[str, Any]
"""One object of metrics.jsonl."""


@dataclass(frozen=True)
class Run:
    """A run's curves and configuration.

    `steps`, `evaluations`: lines in the order of their steps, the last word on each. `repeated`:
    lines of steps that were made again. `config`: values by dotted key; `earlier`: that of before
    a step, by the step, where a later start changed it. `written`: when the last line was. `saved`:
    step of the newest checkpoint, 0 without one. `doing`: what rank 0 said last that it does.
    """

    name: str
    path: Path
    steps: Sequence[Line]
    evaluations: Sequence[Line]
    repeated: int
    written: datetime
    config: Mapping[str, object] = field(default_factory=dict)
    earlier: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    saved: int = 0
    doing: str = ""
    problems: Sequence[str] = ()

    def config_at(self, step: int) -> Mapping[str, object]:
        """The configuration that the step was made with."""
        before = min((number for number in self.earlier if number > step), default=None)
        return self.config if before is None else self.earlier[before]

    @property
    def reached(self) -> int:
        """The last step that anything is known of; not every step is logged."""
        lines = [*self.steps[-1:], *self.evaluations[-1:]]
        return max(self.saved, 0, *(int(line["step"]) for line in lines))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these directories, each once, under names that tell them apart.

    Raises DataError naming every directory that holds no metrics.jsonl.
    """
    unique = list({path.resolve(): path for path in paths}.items())
    missing = [
        f"{path}: no {METRICS} there; give the run.dir of a run of megads-train"
        for resolved, path in unique
        if not (resolved / METRICS).is_file()
    ]
    if missing:
        raise DataError(missing)
    names = _names([resolved for resolved, _ in unique])
    return [_read(name, path) for name, (path, _) in zip(names, unique, strict=True)]


def number(line: Line, key: str) -> float | None:
    """A value of a line, NaN and infinities included; None if it is absent or no number."""
    value = line.get(key)
    if type(value) is float:  # most values of a long run: nothing to convert
        return value
    return float(value) if type(value) is int else None


def finite(line: Line, key: str) -> float | None:
    """A value of a line; None if it is absent, no number, or not a finite one."""
    value = number(line, key)
    return value if value is not None and math.isfinite(value) else None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, by dotted key."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return flat


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(name: str, path: Path) -> Run:
    problems: list[str] = []
    steps, evaluations, repeated = _read_metrics(path / METRICS, problems)
    superseded = path / "metrics.superseded.jsonl"
    if superseded.is_file():
        with _opened(superseded) as file:
            repeated += sum('"loss"' in line for line in file)
    config: dict[str, object] = {}
    if (path / "config.yaml").is_file():
        config = _read_config(path / "config.yaml", problems)
    else:
        problems.append(f"{name}: no config.yaml")
    earlier = {
        int(found[1]): _read_config(file, problems)
        for file in path.glob("config.before-step-*.yaml")
        if (found := re.fullmatch(r"config\.before-step-(\d+)\.yaml", file.name))
    }
    written = datetime.fromtimestamp((path / METRICS).stat().st_mtime, UTC)
    return Run(
        name,
        path,
        steps,
        evaluations,
        repeated,
        written,
        config=config,
        earlier=earlier,
        saved=max(committed_steps(path / "checkpoints"), default=0),
        doing=_last_action(path),
        problems=tuple(problems),
    )


def _last_action(path: Path) -> str:
    """What rank 0 did last. A start that fails moves what its ranks did to a folder of its own."""
    file = activity_file(path, 0)
    kept = sorted((path / "failures").glob(f"*/{file.name}"), reverse=True)
    return next((line for place in (file, *kept) if (line := read_activity(place))), "")


def _read_metrics(path: Path, problems: list[str]) -> tuple[list[Line], list[Line], int]:
    """Lines of steps and of evaluations, and how many of earlier attempts at a step are left out.

    A line of a step that is not after the last one is of a run that went back to a checkpoint.
    """
    steps: list[Line] = []
    evaluations: list[Line] = []
    repeated = unreadable = 0
    with _opened(path) as file:
        for text in file:
            line = _parse(text)
            if line is None:
                unreadable += text.endswith("\n")  # a last line without end is still being written
                continue
            kind = steps if "loss" in line else evaluations if "val_loss" in line else None
            if kind is None:
                continue
            while kind and kind[-1]["step"] >= line["step"]:
                kind.pop()
                repeated += kind is steps
            kind.append(line)
    if unreadable:
        problems.append(f"{path}: {unreadable} unreadable lines left out")
    return steps, evaluations, repeated


def _opened(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace", newline="\n")


def _parse(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    # A long run has a million lines; each would hold copies of all names.
    return _with_shared_keys(line)


def _with_shared_keys(values: dict[str, Any]) -> dict[str, Any]:
    return {
        sys.intern(key): _with_shared_keys(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _read_config(path: Path, problems: list[str]) -> dict[str, object]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"{path}: cannot be read: {' '.join(str(error).split())}")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{path}: not a mapping")
        return {}
    return flatten(values)
