"""What the configuration schema is made of: value types and the base of its groups."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _refuse_bool(value: Any) -> Any:
    """Python counts True as 1; a yes or no where a number belongs is a mistake."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def whole(value: Any) -> int | None:
    """A positive whole number given as such or as text; None for anything else."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value > 0 else None


def divisors(number: int) -> str:
    """All divisors of a number, as text for a message."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _one_is_a_list(value: Any) -> Any:
    """`data.paths=corpus.txt` means a list of one."""
    return (value,) if isinstance(value, str) else value


def _one_for_all(value: Any) -> Any:
    """`data.epochs=1` means the same number for every source."""
    return (value,) if isinstance(value, int | float | str) else value


_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")
_UNITS_S = (86400.0, 3600.0, 60.0, 1.0)


def _seconds(value: Any) -> Any:
    """`3h50m` or `90m` in seconds; a number is one of seconds already."""
    if not isinstance(value, str) or value.replace(".", "", 1).isdecimal():
        return value
    found = _DURATION.fullmatch(value)
    if found is None or not any(found.groups()):
        raise ValueError("write seconds, or a time like 90m or 3h50m")
    return sum(float(n) * unit for n, unit in zip(found.groups(), _UNITS_S, strict=True) if n)


NUMBER = BeforeValidator(_refuse_bool)
Integer = Annotated[int, NUMBER]
Positive = Annotated[int, Field(ge=1), NUMBER]
NonNegative = Annotated[int, Field(ge=0), NUMBER]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False), NUMBER]
Factor = Annotated[float, Field(gt=1.0, allow_inf_nan=False), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False), NUMBER]
Duration = Annotated[float, Field(gt=0.0, allow_inf_nan=False), BeforeValidator(_seconds), NUMBER]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)]
T = TypeVar("T")
PerSource = Annotated[tuple[T | None, ...] | None, BeforeValidator(_one_for_all)]


class Group(BaseModel):
    """Base of every configuration group: immutable, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True
    )
