"""What the settings of bad steps say that cannot be, or that nobody would read. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megads.config.schema import Config, TrainConfig

OF_SPIKES = ("spike_loss", "spike_norm", "spike_window")
OF_REWINDS = ("rewind_skip", "max_rewinds")


def bad_step_problems(config: Config) -> Iterator[str]:
    """Settings of bad steps that do not go together."""
    train, every = config.train, config.checkpoint.every
    rewinding = [name for name in ("nonfinite", "spike") if getattr(train, name) == "rewind"]
    if train.spike == "off":
        yield from _unread(train, OF_SPIKES, "train.spike=skip, stop or rewind, it is off")
    elif train.spike_loss is None and train.spike_norm is None:
        yield (
            f"train.spike={train.spike}: nothing is a spike, as train.spike_loss and "
            f"train.spike_norm are both null; set one of them, or train.spike=off"
        )
    if not rewinding:
        fix = f"train.nonfinite=rewind or train.spike=rewind, they are {train.nonfinite}"
        yield from _unread(train, OF_REWINDS, f"{fix} and {train.spike}")
    elif not every:
        yield (
            f"train.{rewinding[0]}=rewind goes back to a checkpoint, and checkpoint.every={every} "
            f"makes none on the way; set how many steps may be made again at most"
        )


def _unread(train: TrainConfig, names: tuple[str, ...], needed: str) -> Iterator[str]:
    for name in names:
        value = getattr(train, name)
        if value != TrainConfig.model_fields[name].default:
            yield f"train.{name}={value} is only read with {needed}"
