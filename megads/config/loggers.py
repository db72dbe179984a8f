"""What is to be said about the settings of loggers."""

from __future__ import annotations

from collections.abc import Iterator

from megads.config.keys import did_you_mean, near
from megads.config.operation import LoggingConfig
from megads.config.schema import Config
from megads.extras import is_installed, missing_extra

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""Loggers beside metrics.jsonl and the console, and the package that each needs."""
OF_WANDB = ("wandb_project", "wandb_entity", "wandb_name", "wandb_mode")


def logger_problems(config: Config, world_size: int | None) -> Iterator[str]:
    """Loggers that do not exist or lack their package, and settings that nothing reads.

    `world_size`: None if it is not known yet.
    """
    logging = config.logging
    for name in logging.loggers:
        if name not in PACKAGES:
            yield (
                f"logging.loggers={name}: there is no such logger, only {' and '.join(PACKAGES)} "
                f"(metrics.jsonl is always written){did_you_mean(near(name, PACKAGES))}"
            )
    yield from missing_packages(config)
    for setting in OF_WANDB if "wandb" not in logging.loggers else ():
        value = getattr(logging, setting)
        if value != LoggingConfig.model_fields[setting].default:
            yield f"logging.{setting}={value} is only read with logging.loggers=wandb"
    slow = logging.slow_factor
    if not logging.ranks_every and slow != LoggingConfig.model_fields["slow_factor"].default:
        yield f"logging.slow_factor={slow} is only read with logging.ranks_every, it is 0"
    yield from _profile(config, world_size)


def _profile(config: Config, world_size: int | None) -> Iterator[str]:
    steps, ranks = config.logging.profile_steps, config.logging.profile_ranks
    if ranks and not steps:
        yield f"logging.profile_ranks={list(ranks)} is only read with logging.profile_steps"
    if late := [step for step in steps if step > config.train.steps]:
        yield f"logging.profile_steps={late}: the run ends at train.steps={config.train.steps}"
    if world_size is not None and (absent := [rank for rank in ranks if rank >= world_size]):
        yield f"logging.profile_ranks={absent}: the last rank is {world_size - 1}"


def missing_packages(config: Config) -> Iterator[str]:
    """Loggers whose package is not installed here."""
    for name in config.logging.loggers:
        if name in PACKAGES and not is_installed(PACKAGES[name]):
            yield str(missing_extra(PACKAGES[name], f"logging.loggers={name}"))
