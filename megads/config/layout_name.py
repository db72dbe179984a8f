"""Names of parallel layouts, like `tp8pp4` or `tp2pp2dp2zero1`.

A name is a sequence of parts in any order, each at most once:

    tp<n>    tensor-parallel size          dp<n>    data-parallel size (left out: what is left)
    pp<n>    pipeline stages               zero<n>  ZeRO stage, 0 to 3
    vpp<n>   model chunks per stage        sp       sequence parallelism
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megads.errors import ConfigError

EXAMPLES = ("tp2", "pp2", "dp2", "tp2pp2", "tp8pp4", "tp2pp2dp2zero1", "pp4vpp2", "tp2sp")

_PART = re.compile(r"(?P<kind>vpp|tp|pp|dp|zero)(?P<number>\d+)|(?P<flag>sp)")
_FIELD = {"tp": "tp", "pp": "pp", "vpp": "chunks", "dp": "dp", "zero": "zero"}


def parse_layout_name(name: str) -> dict[str, Any]:
    """Fields of `ParallelConfig` that the layout `name` sets.

    Raises:
        ConfigError: the name is not a sequence of parts, a part comes twice or a size is not valid.
    """
    fields: dict[str, Any] = {}
    position = 0
    while position < len(name):
        match = _PART.match(name, position)
        if match is None:
            raise _bad_name(name, f"{name[position:]!r} is not a part of one")
        kind = match["kind"] or match["flag"]
        field = "sequence_parallel" if kind == "sp" else _FIELD[kind]
        if field in fields:
            raise _bad_name(name, f"{kind} comes twice")
        fields[field] = True if kind == "sp" else _size(name, kind, match["number"])
        position = match.end()
    if not fields:
        raise _bad_name(name, "it is empty")
    return fields


def format_layout_name(fields: Mapping[str, Any]) -> str:
    """The shortest name of a layout, parts in one order; `tp1` for a single process."""
    name = "".join(
        f"{kind}{fields[field]}"
        for kind, field in _FIELD.items()
        if fields.get(field) is not None and fields[field] != (0 if kind == "zero" else 1)
    )
    return name + ("sp" if fields.get("sequence_parallel") else "") or "tp1"


def _size(name: str, kind: str, number: str) -> int:
    value = int(number)
    if str(value) != number:
        raise _bad_name(name, f"write {kind}{value}, not {kind}{number}")
    if kind == "zero" and value > 3:
        raise _bad_name(name, f"zero{value}: ZeRO stages are 0, 1, 2 and 3")
    if kind != "zero" and value < 1:
        raise _bad_name(name, f"{kind}{value}: sizes start at 1")
    return value


def _bad_name(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"parallel={name}: not a layout, {why}. A layout is made of tp<n>, pp<n>, vpp<n>, dp<n>, "
        f"zero<n> and sp, in any order, each at most once, like {', '.join(EXAMPLES[3:])}"
    )
