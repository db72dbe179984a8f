"""Values that are written into a job's file: time limits as SLURM writes them, single lines."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from megads.config.fields import Names

_WITHOUT_DAYS = re.compile(r"(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<minutes>\d+)")
_WITH_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?")
_UNIT_S = {"d": 86400, "h": 3600, "m": 60, "minutes": 60, "s": 1}
_UNLIMITED = ("UNLIMITED", "INFINITE")


def job_seconds(text: str) -> float | None:
    """Seconds of a time limit; infinite for no limit, None for what is no time.

    `90` and `90:00` are minutes, `1:30:00` hours, `2-12` and `2-12:30` days and hours.
    """
    if text.upper() in _UNLIMITED:
        return math.inf
    found = _WITHOUT_DAYS.fullmatch(text) or _WITH_DAYS.fullmatch(text)
    if found is None:
        return None
    return sum(_UNIT_S[unit] * int(n) for unit, n in found.groupdict().items() if n)


def _time(value: Any) -> Any:
    if not isinstance(value, str):
        # YAML reads 24:00:00 without quotes as 86400, which for SLURM would be minutes.
        raise ValueError(f"{value} is a bare number; write 90:00 or, in a YAML file, '24:00:00'")
    if not job_seconds(value):
        raise ValueError(f"{value} is no time; write it like 90:00, 24:00:00 or 1-12:00:00")
    return value


def _line(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} must be one line of text")
    return value


def _lines(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_line(value) for value in values)


JobTime = Annotated[str, BeforeValidator(_time)]
Line = Annotated[str, AfterValidator(_line)]
Lines = Annotated[Names, AfterValidator(_lines)]
