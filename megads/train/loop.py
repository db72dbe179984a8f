"""The training loop: steps, evaluation, checkpoints, stopping."""

from __future__ import annotations

import time
from pathlib import Path

from megads.config.decode import to_yaml
from megads.config.schema import Config
from megads.data.loader import TokenLoader
from megads.errors import FINISHED_STATUS, STOPPED_STATUS, NonFiniteError
from megads.launch.env import RankInfo
from megads.launch.signals import StopRequest
from megads.models.flops import device_peak_tflops, training_flops
from megads.parallel.collectives import synchronize
from megads.train.build import RunParts, build
from megads.train.checkpointing import finish, must_stop, resume, save, settle
from megads.train.evaluate import evaluate
from megads.train.metrics import device_name
from megads.train.step import StepResult, train_step
from megads.train.usage import memory_report


def train(config: Config, info: RankInfo) -> int:
    """Run or resume training to `train.steps`; returns the exit status. Collective.

    Raises NonFiniteError when a loss or gradient norm is not finite and `train.nonfinite=stop`;
    the model has not been updated with it then, and no checkpoint written. Raises CheckpointError
    when a save failed and `checkpoint.on_error=stop`, or when it was the last one.
    """
    with StopRequest() as stop:
        parts = build(config, info)
        try:
            resume(parts)
            status = _run(parts, stop)
        finally:
            settle(parts)
            parts.loader.close()
            parts.metrics.close()
            parts.ledger.close()
        parts.close()
        return status


def _run(parts: RunParts, stop: StopRequest) -> int:
    config, state = parts.config, parts.state
    steps, checkpoint = config.train.steps, config.checkpoint
    if state.step >= steps:
        parts.metrics.note(f"already finished: step {state.step} of {steps}")
        return FINISHED_STATUS
    _write_config(parts)
    parts.metrics.rewind(state.step)
    _start_ledger(parts)
    saved_at = state.step
    while state.step < steps:
        started = time.perf_counter()
        result = train_step(parts, stop_requested=stop.requested or must_stop(parts))
        synchronize(parts.mesh.device)
        _record(parts, result)
        _report(parts, result, time.perf_counter() - started)
        _check_finite(parts, result)
        is_last = state.step == steps
        if _due(config.eval.every, state.step) or (config.eval.every and is_last):
            validation = evaluate(parts)
            parts.metrics.evaluation(state.step, validation.loss, validation.by_source)
        if _due(checkpoint.every, state.step) or result.stop_requested:
            _save(parts)
            saved_at = state.step
        if result.stop_requested and not is_last:
            finish(parts)
            parts.metrics.note(f"stopped on request; step {state.step} is saved")
            return STOPPED_STATUS
    if checkpoint.save_last and saved_at != state.step:
        _save(parts)
    finish(parts)
    return FINISHED_STATUS


def _start_ledger(parts: RunParts) -> None:
    if isinstance(parts.loader, TokenLoader):
        parts.ledger.start(
            parts.loader.order,
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
    parts.ledger.sync()
    save(parts)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _check_finite(parts: RunParts, result: StepResult) -> None:
    """Stop the run, on every rank alike, unless the step's update may be skipped."""
    if result.applied:
        return
    skippable = parts.config.train.nonfinite == "skip" or parts.scaler.dynamic
    if not skippable or parts.scaler.exhausted:
        raise NonFiniteError(
            f"step {parts.state.step}: loss {result.loss}, gradient norm {result.grad_norm}; the "
            f"update was not made. train.nonfinite=skip leaves such steps out and goes on"
        )


def _report(parts: RunParts, result: StepResult, seconds: float) -> None:
    config, state = parts.config, parts.state
    if not _due(config.logging.every, state.step) and result.applied:
        return
    batch = result.batch
    tokens = batch.global_batch_size * batch.seq_length
    flops = training_flops(config.model, batch.global_batch_size, batch.seq_length)
    tflops = flops / seconds / parts.mesh.world.size / 1e12
    peak = config.logging.peak_tflops or device_peak_tflops(
        device_name(parts.mesh.device), config.precision.name
    )
    parts.metrics.step(
        {
            "step": state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": state.tokens,
            "samples": state.samples,
            "step_time_s": seconds,
            "data_wait_s": result.data_wait_s,
            "tokens_per_second": tokens / seconds,
            "tflops_per_device": tflops,
            "mfu": tflops / peak if peak else None,
            "loss_scale": result.loss_scale,
            "skipped": parts.scaler.skipped,
            **memory_report(parts),
        },
        config.train.steps,
    )


def _write_config(parts: RunParts) -> None:
    """Record the resolved configuration; another one of an earlier start is kept beside it."""
    if parts.mesh.world.index:
        return
    path = Path(parts.config.run.dir) / "config.yaml"
    text = to_yaml(parts.config)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.replace(path.with_name(f"config.before-step-{parts.state.step + 1}.yaml"))
    temporary = path.with_suffix(".yaml.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
