"""The training loop: steps, evaluation, checkpoints, stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megads.config.decode import to_yaml
from megads.config.schema import Config
from megads.data.loader import TokenLoader
from megads.errors import FINISHED_STATUS, STOPPED_STATUS
from megads.launch.activity import Activity
from megads.launch.env import RankInfo
from megads.launch.signals import StopRequest
from megads.parallel.collectives import broadcast_object
from megads.train.bad_steps import handle_bad_step
from megads.train.build import RunParts, build
from megads.train.checkpointing import finish, has_way_back, must_stop, resume, save, settle
from megads.train.evaluate import evaluate
from megads.train.step import StepResult, train_step
from megads.train.usage import speed_report


def train(
    config: Config,
    info: RankInfo,
    activity: Activity | None = None,
    deadline: float | None = None,
) -> int:
    """Run or resume training to `train.steps`; returns the exit status. Collective.

    `activity` is told what this rank does. After `deadline`, in seconds since the epoch, the run
    saves and stops, as on a signal.

    Raises BadStepError when a step is bad and the configuration says to stop, or nothing else is
    left to do; the model has not been updated with it then, and no checkpoint written. Raises
    CheckpointError when a save failed and `checkpoint.on_error=stop`, or when it was the last one.
    """
    with StopRequest(deadline) as stop:
        parts = build(config, info, activity)
        status = 1  # unless the run comes to an end by itself
        try:
            resume(parts)
            status = _run(parts, stop)
        finally:
            parts.timer.stop()
            settle(parts)
            parts.loader.close()
            parts.metrics.close(status)
            parts.ledger.close()
        parts.close()
        return status


def _run(parts: RunParts, stop: StopRequest) -> int:
    config, state = parts.config, parts.state
    steps, checkpoint = config.train.steps, config.checkpoint
    evaluated = not _lacks_evaluation(parts)
    if state.step >= steps and evaluated:
        parts.metrics.note(f"already finished: step {state.step} of {steps}")
        return FINISHED_STATUS
    _write_config(parts)
    parts.metrics.rewind(state.step)
    _start_ledger(parts)
    if not has_way_back(parts):
        _save(parts)
    saved_at = state.step
    parts.timer.start()
    if not evaluated and not _evaluate(parts, stop):
        return _stopped(parts, evaluated=False)
    while state.step < steps:
        with parts.timer.step(state.step + 1):
            result = train_step(parts, stop_requested=stop.requested or must_stop(parts))
        _record(parts, result)
        _report(parts, result)
        if handle_bad_step(parts, result):
            _start_ledger(parts)
            saved_at = state.step
            continue
        evaluated = not _evaluation_due(parts) or (
            not result.stop_requested and _evaluate(parts, stop)
        )
        stops = result.stop_requested or not evaluated
        if _due(checkpoint.every, state.step) or stops:
            _save(parts)
            saved_at = state.step
        if stops and (state.step < steps or not evaluated):
            return _stopped(parts, evaluated=evaluated)
    if checkpoint.save_last and saved_at != state.step:
        _save(parts)
    _finish(parts)
    return FINISHED_STATUS


def _stopped(parts: RunParts, *, evaluated: bool) -> int:
    _finish(parts)
    later = "" if evaluated else "; its evaluation comes when the run goes on"
    parts.metrics.note(f"stopped on request; step {parts.state.step} is saved{later}")
    return STOPPED_STATUS


def _evaluate(parts: RunParts, stop: StopRequest) -> bool:
    """Measure and record the validation loss; False if a request to stop has cut that short."""
    result = evaluate(parts, lambda: stop.requested or must_stop(parts))
    if result is not None:
        parts.metrics.evaluation(parts.state.step, result.loss, result.by_source)
    return result is not None


def _evaluation_due(parts: RunParts) -> bool:
    every, step = parts.config.eval.every, parts.state.step
    return _due(every, step) or (every > 0 and step == parts.config.train.steps)


def _lacks_evaluation(parts: RunParts) -> bool:
    """Whether an earlier start of the run was stopped before this step's evaluation. Collective."""
    if not parts.state.step or not _evaluation_due(parts):
        return False
    step = parts.state.step
    mine = parts.metrics.lacks_evaluation(step) and step in parts.store.steps()
    return broadcast_object(mine, parts.mesh.world)


def _start_ledger(parts: RunParts) -> None:
    if isinstance(parts.loader, TokenLoader):
        parts.ledger.start(
            parts.loader.order,
            run=parts.state.run_id,
            step=parts.state.step,
            samples=parts.state.samples,
            seq_length=parts.config.train.seq_length,
        )


def _record(parts: RunParts, result: StepResult) -> None:
    """Put the step into the ledger, also when its update was left out: its samples are read."""
    count = result.batch.global_batch_size
    parts.ledger.record(parts.state.step, parts.state.samples - count, count)


def _save(parts: RunParts) -> None:
    """Save; the ledger first, so that no checkpoint knows of steps that it does not."""
    with parts.timer.saving():
        parts.ledger.sync()
        save(parts)


def _finish(parts: RunParts) -> None:
    """Wait for the last save."""
    parts.timer.stop("waiting for the last save")
    finish(parts)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _report(parts: RunParts, result: StepResult) -> None:
    config, state, time = parts.config, parts.state, parts.timer.last
    assert time is not None
    if _due(config.logging.ranks_every, state.step):
        for note in parts.timer.compare_ranks():
            parts.metrics.note(f"step {state.step}: {note}")
    if not _due(config.logging.every, state.step) and result.applied:
        return
    if result.memory_news:
        parts.memory.exchange()
    values: dict[str, Any] = {
        "step": state.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": state.tokens,
        "samples": state.samples,
        "step_time_s": time.seconds,
        "data_wait_s": time.durations.own["data"],
        "phases_s": time.durations.by_phase,
        **speed_report(parts, result.batch, time.seconds),
        "loss_scale": result.loss_scale,
        "skipped": parts.scaler.skipped,
        **parts.timer.taken(),
        **parts.memory.most,
    }
    parts.metrics.step(values, config.train.steps)


def _write_config(parts: RunParts) -> None:
    """Record the resolved configuration; another one of an earlier start is kept beside it."""
    if parts.mesh.world.index:
        return
    path = Path(parts.config.run.dir) / "config.yaml"
    text = to_yaml(parts.config)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        kept = path.with_name(f"config.before-step-{parts.state.step + 1}.yaml")
        if not kept.exists():  # else that start's own steps are made again now
            path.replace(kept)
    temporary = path.with_suffix(".yaml.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
