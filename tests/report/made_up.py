"""Run directories as training leaves them, made up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megads.pipeline.schedule import build_schedule
from megads.pipeline.simulate import simulate

CONFIG: dict[str, Any] = {
    "run": {"dir": "runs/made-up"},
    "train": {"steps": 200, "seed": 1234},
    "optim": {"lr": 0.001, "betas": [0.9, 0.95]},
    "parallel": {"tp": 1, "pp": 2, "dp": None, "chunks": 1, "zero": 1, "schedule": "auto"},
}


def config(**changes: Any) -> dict[str, Any]:
    """A configuration with other values at some dotted keys; `__` stands for the dot."""
    values = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        group, _, name = key.partition("__")
        values[group][name] = value
    return values


def step_line(step: int, rng: random.Random, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as a step writes it."""
    seconds = 0.5 + rng.random() / 20
    phases = {"forward": seconds * 0.3, "backward": seconds * 0.5, "receive": seconds * 0.2}
    line = {
        "step": step,
        "loss": 5.5 * math.exp(-step / 80) + 1 + rng.random() / 10,
        "grad_norm": 1 + rng.random(),
        "lr": 1e-3 * math.cos(step / 150) ** 2,
        "tokens": step * 4096,
        "samples": step * 8,
        "step_time_s": seconds,
        "phases_s": phases,
        "data_wait_s": 0.001,
        "save_s": 0.0,
        "tokens_per_second": 4096 / seconds,
        "tflops_per_device": 0.01,
        "mfu": 0.4 + rng.random() / 100,
        "hfu": 0.45 + rng.random() / 100,
        "loss_scale": 1.0,
        "skipped": 0,
        "peak_memory_bytes": 600 << 20,
        "parameter_bytes": 100 << 20,
        "gradient_bytes": 200 << 20,
        "optimizer_bytes": 150 << 20,
        "buffer_bytes": 1 << 20,
        "host_bytes": 0,
        "file_bytes": 0,
    }
    if step % 10 == 0:
        line["rank_times_s"] = [seconds * (0.9 + rng.random() / 5) for _ in range(4)]
    return line | values


def evaluation_line(step: int, loss: float) -> dict[str, Any]:
    sources = {"books": loss - 0.1, "web": loss + 0.1}
    return {
        "step": step,
        "val_loss": loss,
        "val_ppl": math.exp(loss),
        "val_loss_by_source": sources,
    }


def write_run(
    folder: Path, lines: list[dict[str, Any]] | None = None, values: Any = None, steps: int = 200
) -> Path:
    """metrics.jsonl and config.yaml; by default those of a run with an evaluation every 50."""
    folder.mkdir(parents=True, exist_ok=True)
    if lines is None:
        rng = random.Random(str(folder))
        lines = []
        for step in range(1, steps + 1):
            lines.append(step_line(step, rng))
            if step % 50 == 0:
                lines.append(evaluation_line(step, lines[-1]["loss"] + 0.05))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(values or config()), encoding="utf-8")
    return folder


def write_profile(
    run: Path,
    step: int = 5,
    *,
    pp: int = 2,
    chunks: int = 1,
    microbatches: int = 4,
    tp: int = 1,
    delay: float = 0.0,
    schedule: str = "auto",
    costs: Sequence[float] = (),
) -> None:
    """Timelines of a step whose forwards take exactly `costs`, by virtual stage, backwards double.

    Without costs a forward takes 10 ms, that of the last virtual stage 15.

    Stage `s` starts `delay * s` later than it could, and `data` comes before everything.
    """
    costs = costs or [0.010] * (pp * chunks - 1) + [0.015]
    report = simulate(
        build_schedule(schedule, pp, chunks, microbatches),
        chunks,
        microbatches,
        forward_costs=costs,
        backward_costs=[2 * cost for cost in costs],
        send_window=microbatches,
    )
    folder = run / "profile" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    names = {"F": "forward", "B": "backward"}
    for stage, made in enumerate(report.timeline):
        begin = 0.003 + delay * stage
        spans: list[dict[str, Any]] = [{"name": "data", "start_s": 0.0, "end_s": 0.002}]
        before = 0.002
        for action, start, end in made:
            if begin + start > before:
                spans.append({"name": "receive", "start_s": before, "end_s": begin + start})
            where = {"chunk": action.chunk, "microbatch": action.microbatch}
            times = {"start_s": begin + start, "end_s": begin + end}
            spans.append({"name": names[action.op], **where, **times})
            before = begin + end
        spans.append({"name": "optimizer", "start_s": before, "end_s": before + 0.004})
        for index in range(tp):
            rank = stage * tp + index
            content = {
                "step": step,
                "rank": rank,
                "coords": {"pp": stage, "dp": 0, "tp": index},
                "seconds": before + 0.004,
                "spans": spans,
            }
            (folder / f"rank-{rank}.json").write_text(json.dumps(content), encoding="utf-8")
