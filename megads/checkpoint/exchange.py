"""Work that all ranks do together: all of them succeed, or all of them raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megads.errors import CheckpointError, DamageError, LostRanksError
from megads.parallel.collectives import all_gather_object
from megads.parallel.mesh import Axis

T = TypeVar("T")


def together(axis: Axis, doing: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results; if it fails on any, all raise.

    Raises DamageError when damaged files are all that went wrong, else CheckpointError, with the
    failed ranks' messages; it may pass if what went wrong on any rank may.
    """
    cause: Exception | None = None
    outcome: tuple[T | None, str | None, bool, bool]
    try:
        outcome = work(), None, False, False
    except Exception as error:
        may_pass = isinstance(error, CheckpointError) and error.may_pass
        damaged = isinstance(error, DamageError)
        cause, outcome = error, (None, _describe(error), damaged, may_pass)
    try:
        outcomes = all_gather_object(outcome, axis)
    except RuntimeError as error:
        lost = LostRanksError(
            f"{doing}: the other ranks cannot be reached: {error}. (A rank that is done waits for "
            f"the others for 0.8 of launch.timeout_s)"
        )
        raise lost from error
    failures = {rank: text for rank, (_, text, *_) in enumerate(outcomes) if text is not None}
    if not failures:
        return [result for result, *_ in outcomes]
    kind = DamageError if all(outcomes[rank][2] for rank in failures) else CheckpointError
    lines = [f"rank {rank}: {text}" for rank, text in list(failures.items())[:8]]
    if len(failures) > 8:
        lines.append(f"and {len(failures) - 8} more ranks")
    if len(set(failures.values())) == 1 and len(failures) == axis.size:
        lines = [failures[0]]
    failure = kind(f"{doing}: {'; '.join(lines)}")
    failure.may_pass = any(may_pass for *_, may_pass in outcomes)
    raise failure from cause


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
