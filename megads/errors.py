"""The exceptions megads raises on purpose, each with the exit status its command ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

FINISHED_STATUS = 0
STOPPED_STATUS = 3
"""Exit status of a run that a signal stopped, once it has saved."""
Teller = Literal["rank", "machine", "job"]


@contextmanager
def told_by(teller: Teller) -> Iterator[None]:
    """Errors that are raised in it are met by all ranks of a machine, or of the job, alike."""
    try:
        yield
    except MegadsError as error:
        error.told_by = teller
        raise


class MegadsError(Exception):
    """Base of every error whose message is written for the user; no traceback is needed.

    `may_pass`: starting the job again may help. `told_by`: who tells of it in a job whose launcher
    does not: every rank that meets it, or, where all do alike, the first of each machine or of all.
    """

    exit_status = 1
    may_pass = False
    told_by: Teller = "rank"


class ConfigError(MegadsError):
    """The configuration cannot be run. Holds every problem found, not only the first.

    Each problem names the dotted config path, the values that disagree, and the fix.
    """

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(self.problems))


class LayoutError(ConfigError):
    """The parallel layout does not fit the model, the batch or the machines."""


class DataError(ConfigError):
    """A data file is missing, damaged, or too small for what was asked of it."""


class CheckpointError(MegadsError):
    """A checkpoint is missing, incomplete or does not match the model."""


class LostRanksError(CheckpointError):
    """The others do not answer any more: what is done together cannot be done again."""

    may_pass = True


class DamageError(CheckpointError):
    """Files of a checkpoint are not what was once committed; an older checkpoint may be whole."""


class KernelUnavailable(MegadsError):
    """A kernel backend was asked for that cannot run here; the message says why."""

    exit_status = 2


class BadStepError(MegadsError):
    """The loss or the gradient norm is not finite or a spike, and the run may not go on."""


class HangError(MegadsError):
    """A rank made no progress for as long as the configuration allows."""

    may_pass = True


class WorkerFailure(MegadsError):
    """A worker process failed; the message carries the first failing rank's traceback."""
