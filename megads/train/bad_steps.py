"""What a bad step leads to: its update is left out, the run ends, or it goes back behind the step.

A rewind loads a checkpoint from before the samples that are to be left out, and the run goes on
from there as if they had never been in its data. That is written into the data ledger before the
run goes on, so whoever continues it later leaves them out too. The checkpoints in between, if any,
were trained on them; they are set aside before.
"""

from __future__ import annotations

from megads.data.ledger import Rewind
from megads.errors import BadStepError
from megads.train.build import RunParts
from megads.train.checkpointing import go_back
from megads.train.data import continue_plan
from megads.train.step import StepResult


def handle_bad_step(parts: RunParts, result: StepResult) -> bool:
    """Do what the configuration says if the last step was bad. Collective.

    Returns whether the run was rewound: its state is then that of an earlier step, whose successor
    comes next. Overflows in fp16 are left to the loss scale until it cannot get any smaller.
    Raises BadStepError when the run is to end, CheckpointError without a checkpoint to go back
    to, and DataError when too few samples are left for the rest of the run.
    """
    scaler, train = parts.scaler, parts.config.train
    is_overflow = result.verdict == "nonfinite" and scaler.dynamic and not scaler.exhausted
    if result.verdict == "good" or is_overflow:
        return False
    name = "train.spike" if result.verdict == "spike" else "train.nonfinite"
    policy = train.spike if result.verdict == "spike" else train.nonfinite
    if policy == "rewind":
        if len(parts.rewinds) < train.max_rewinds:
            with parts.mesh.phases.waiting("rewind"):
                _rewind(parts, result)
            return True
        raise BadStepError(f"{_described(parts, result)}. {_tried(parts)}")
    if policy == "stop":
        raise BadStepError(
            f"{_described(parts, result)}. {name}=skip leaves such updates out and goes on, "
            f"{name}=rewind leaves out the samples as well"
        )
    if parts.guard.is_new_level:
        raise BadStepError(
            f"{_described(parts, result)}. These were {train.spike_window} spikes in a row, none "
            f"of them trained on, so more will follow: raise train.spike_loss={train.spike_loss} "
            f"or train.spike_norm={train.spike_norm}, or set train.spike=rewind"
        )
    return False


def _rewind(parts: RunParts, result: StepResult) -> None:
    state, loader = parts.state, parts.loader
    bad_step, count = state.step, parts.config.train.rewind_skip
    begin, end = state.samples - result.batch.global_batch_size, state.samples
    parts.metrics.note(f"WARNING: {_described(parts, result)}")
    go_back(parts, before=bad_step, wanted=bad_step - count)
    # The steps up to the bad one will read the same samples again: batches have the same sizes.
    good = max(0, bad_step - count - state.step)
    first = min(begin, parts.rampup.consumed_after(good, state.samples))
    rewind = Rewind(
        state.run_id,
        bad_step,
        state.step,
        loader.position(first),
        loader.position(end - 1) + 1,
        result.verdict,
        result.loss,
        result.grad_norm,
    )
    parts.rewinds.append(rewind)
    parts.ledger.rewind(rewind)
    parts.metrics.rewind(state.step)
    parts.metrics.note(
        f"rewind {len(parts.rewinds)} of at most {parts.config.train.max_rewinds}: {rewind}"
    )
    for note in continue_plan(parts.config, loader, state, parts.rewinds):
        parts.metrics.note(note)


def _described(parts: RunParts, result: StepResult) -> str:
    kind = "is a spike" if result.verdict == "spike" else "is not finite"
    usual = parts.guard.medians() if result.verdict == "spike" else ""
    return (
        f"step {parts.state.step} {kind}: loss {result.loss:.4g}, gradient norm "
        f"{result.grad_norm:.4g}{f' ({usual})' if usual else ''}; the update was not made"
    )


def _tried(parts: RunParts) -> str:
    """Why there is no other rewind, with those that were made."""
    most = parts.config.train.max_rewinds
    if not parts.rewinds:
        return f"train.max_rewinds={most} allows no rewind"
    made = "; ".join(map(str, parts.rewinds))
    return (
        f"train.max_rewinds={most} and {len(parts.rewinds)} were made: {made}. A larger number "
        f"allows more, data.skip leaves out samples by hand"
    )
