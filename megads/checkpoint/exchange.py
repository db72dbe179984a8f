"""Work that all ranks do together: all of them succeed, or all of them raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megads.errors import CheckpointError, DamageError
from megads.parallel.collectives import all_gather_object
from megads.parallel.mesh import Axis

T = TypeVar("T")


def together(axis: Axis, doing: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results; if it fails on any, all raise.

    Raises DamageError when damaged files are all that went wrong, else CheckpointError, with the
    failed ranks' messages.
    """
    cause: Exception | None = None
    outcome: tuple[T | None, str | None, bool]
    try:
        outcome = work(), None, False
    except Exception as error:
        cause, outcome = error, (None, _describe(error), isinstance(error, DamageError))
    try:
        outcomes = all_gather_object(outcome, axis)
    except RuntimeError as error:
        lost = CheckpointError(f"{doing}: the other ranks cannot be reached: {error}")
        lost.may_pass = True
        raise lost from error
    failures = {rank: text for rank, (_, text, _) in enumerate(outcomes) if text is not None}
    if not failures:
        return [result for result, _, _ in outcomes]
    damaged = all(outcomes[rank][2] for rank in failures)
    kind = DamageError if damaged else CheckpointError
    if len(set(failures.values())) == 1 and len(failures) == axis.size:
        raise kind(f"{doing}: {failures[0]}") from cause
    lines = [f"rank {rank}: {text}" for rank, text in list(failures.items())[:8]]
    more = [f"and {len(failures) - 8} more ranks"] if len(failures) > 8 else []
    raise kind(f"{doing}: " + "; ".join(lines + more)) from cause


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
