"""What the settings of the optimizer say that cannot be, or that nobody would read. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megads.config.rampup import BatchRampup
from megads.config.schema import Config, OptimConfig, PrecisionConfig, TrainConfig
from megads.errors import ConfigError

SETTINGS_OF = {"adamw": ("betas", "eps"), "sgd": ("momentum",)}
"""Settings that only one optimizer reads."""
OF_FP16 = ("initial_loss_scale", "loss_scale_window", "min_loss_scale")


def optimizer_problems(config: Config) -> Iterator[str]:
    """Settings of the optimizer, its schedule and the loss scale that do not go together."""
    optim, train = config.optim, config.train
    if optim.min_lr > optim.lr and optim.schedule != "constant":
        yield f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}"
    total = optim.total or (train.steps if optim.units == "steps" else _samples(train))
    decay = optim.decay if optim.schedule == "wsd" else 0
    if optim.schedule != "constant" and train.steps and optim.warmup + decay > total:
        yield (
            f"optim.warmup={optim.warmup} + optim.decay={decay} is more than the "
            f"{total} {optim.units} of the schedule; make them shorter, or the run longer"
        )
    if optim.decay and optim.schedule != "wsd":
        yield f"optim.decay={optim.decay} is for optim.schedule=wsd, it is {optim.schedule}"
    if optim.schedule == "inverse_sqrt" and optim.units == "samples" and not optim.warmup:
        yield (
            f"optim.schedule=inverse_sqrt in optim.units=samples needs optim.warmup: without one "
            f"the rate falls from sample 1 on, and the first update, of {train.global_batch_size} "
            f"samples, has only optim.lr / sqrt({train.global_batch_size})"
        )
    for name, settings in SETTINGS_OF.items():
        for setting in settings if name != optim.name else ():
            value = getattr(optim, setting)
            if value != OptimConfig.model_fields[setting].default:
                yield f"optim.{setting}={value} is for optim.name={name}, it is {optim.name}"
    precision = config.precision
    for setting in OF_FP16 if precision.name != "fp16" else ():
        value = getattr(precision, setting)
        if value != PrecisionConfig.model_fields[setting].default:
            yield f"precision.{setting}={value} is for precision=fp16, it is {precision.name}"
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"precision.min_loss_scale={precision.min_loss_scale} is above "
            f"precision.initial_loss_scale={precision.initial_loss_scale}"
        )


def _samples(train: TrainConfig) -> int:
    """What a run consumes; with a ramp-up that cannot be, about as much."""
    try:
        rampup = BatchRampup.make(train.batch_rampup, train.global_batch_size)
    except ConfigError:
        return train.steps * train.global_batch_size
    return rampup.consumed_after(train.steps)
