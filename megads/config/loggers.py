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


def logger_problems(config: Config) -> Iterator[str]:
    """Loggers that do not exist or lack their package, and settings that none of them reads."""
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


def missing_packages(config: Config) -> Iterator[str]:
    """Loggers whose package is not installed here."""
    for name in config.logging.loggers:
        if name in PACKAGES and not is_installed(PACKAGES[name]):
            yield str(missing_extra(PACKAGES[name], f"logging.loggers={name}"))
