"""What SLURM's environment variables mean. Pure: takes their values, returns data."""

from __future__ import annotations

import re
from collections.abc import Iterator

FIRST_PORT = 10_000
PORTS = 20_000


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a SLURM node list, in its order.

    `n[01-03,7],login` gives `n01 n02 n03 n7 login`; several brackets in one name multiply, the
    last varying fastest. Raises ValueError when a bracket is not closed or a range is empty.
    """
    return [host for part in _split_outside_brackets(nodelist) for host in _expand(part)]


def first_host(nodelist: str) -> str:
    """The host on which rank 0 runs: the first one of the list."""
    hosts = expand_nodelist(nodelist)
    if not hosts:
        raise ValueError(f"the node list {nodelist!r} names no host")
    return hosts[0]


def master_port(job_id: int, starts: int = 0) -> int:
    """A port that all tasks of a job step derive alike, and that other jobs seldom share.

    `starts` counts the earlier starts of the job: each gets another port, as the one before may
    not be free yet.
    """
    return FIRST_PORT + (job_id * 31 + starts) % PORTS


def _split_outside_brackets(nodelist: str) -> Iterator[str]:
    part, depth = "", 0
    for char in nodelist.strip():
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            yield part
            part = ""
        else:
            part += char
    if depth != 0:
        raise ValueError(f"unbalanced brackets in the node list {nodelist!r}")
    if part:
        yield part


def _expand(name: str) -> Iterator[str]:
    found = re.search(r"\[([^\[\]]*)\]", name)
    if found is None:
        yield name
        return
    prefix, suffix = name[: found.start()], name[found.end() :]
    for number in _numbers(found.group(1)):
        yield from (prefix + number + rest for rest in _expand(suffix))


def _numbers(ranges: str) -> Iterator[str]:
    """The numbers of `01-03,7` as text, with the leading zeros of the lower end."""
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal()) or int(low) > int(high):
            raise ValueError(f"{piece!r} is not a number or a range of node numbers")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))
