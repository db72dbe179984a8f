"""Pipeline schedules as data: what each stage does, in order. Pure: no torch.

A schedule is one list of `Action` per stage. Stages form a ring on which virtual stage
`chunk * num_stages + stage` of the model lies on `stage`. Each direction of each link of the ring
has its own first-in-first-out communicator, and an action list reads:

    recv_act, recv_grad   post the receive that F or B of the same chunk and microbatch waits for
    F, B                  wait for that message if there is one, and compute
    send_act, send_grad   hand the result of F or B of the same chunk and microbatch to its reader

Receives are posted one computation ahead, so that a message travels while its reader is busy.
Messages are received in the order in which they are used, and sent in the order in which they are
made. A stage goes on after a send while at most `send_window` messages of that link are waiting for
their receive to be posted, and stands still otherwise. With a single stage there are no messages:
virtual stages pass values on directly.

Schedules: GPipe (Huang et al. 2019, arXiv:1811.06965); one forward, one backward (PipeDream-Flush,
Narayanan et al. 2021, arXiv:2006.09503); interleaved (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from megads.errors import ConfigError

Op = Literal["F", "B", "send_act", "recv_act", "send_grad", "recv_grad"]


class Action(NamedTuple):
    """One step of a stage, for one of its own chunks and one microbatch."""

    op: Op
    chunk: int
    microbatch: int


Schedule = list[list[Action]]
"""Actions of each stage, in order."""


class Size(NamedTuple):
    """What a schedule is built for."""

    num_stages: int
    chunks: int
    num_microbatches: int


def build_schedule(name: str, num_stages: int, chunks: int, num_microbatches: int) -> Schedule:
    """The training schedule `name`: every F and B of every chunk and microbatch, with messages.

    `auto` is 1f1b, or interleaved when there are several chunks. Raises ConfigError for a name
    that is not in `SCHEDULES`, a size below 1, or 1f1b with several chunks.
    """
    if name == "auto":
        name = "1f1b" if chunks == 1 else "interleaved"
    if name not in SCHEDULES:
        raise ConfigError(
            f"parallel.schedule={name} is unknown; choices: {', '.join(['auto', *SCHEDULES])}"
        )
    return _finish(SCHEDULES[name], Size(num_stages, chunks, num_microbatches))


def build_forward_schedule(num_stages: int, chunks: int, num_microbatches: int) -> Schedule:
    """Forward passes only, for evaluation: every F of every chunk and microbatch, with messages."""
    return _finish(_forwards_only, Size(num_stages, chunks, num_microbatches))


def send_window(num_stages: int, num_microbatches: int) -> int:
    """Undelivered messages per link with which a stage may go on; every schedule runs with it.

    A group of microbatches larger than the ring comes back to its first stage before that stage
    has sent all of it: the surplus has to wait somewhere, and it waits at its sender. Two spare
    messages let a stage run ahead of a neighbour that is late.
    """
    largest = max(len(g) for g in _groups(Size(num_stages, 1, num_microbatches)))
    return max(2, largest - num_stages)


def _gpipe(size: Size, stage: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [*_forward_order(size), *_backward_order(size)]


def _forwards_only(size: Size, stage: int) -> list[Action]:
    return list(_forward_order(size))


def _1f1b(size: Size, stage: int) -> list[Action]:
    """At most `num_stages - stage` microbatches in flight: as many as lie ahead in the pipe."""
    if size.chunks > 1:
        raise ConfigError(
            f"parallel.schedule=1f1b runs one chunk per stage, parallel.chunks={size.chunks}; "
            f"use parallel.schedule=interleaved"
        )
    return _alternate(size, warmup=size.num_stages - stage - 1)


def _interleaved(size: Size, stage: int) -> list[Action]:
    """Several chunks per stage shrink the bubble by their number.

    The first backward of the last stage can start when it has run its earlier chunks on a whole
    group; every stage before it is one forward and one backward hop further away.
    """
    if size.chunks == 1:
        return _1f1b(size, stage)
    group = max(len(g) for g in _groups(size))
    return _alternate(size, warmup=2 * (size.num_stages - stage - 1) + (size.chunks - 1) * group)


SCHEDULES: Mapping[str, Callable[[Size, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
}
"""Registry: name -> function of (size, stage) giving that stage's F and B actions in order."""


def _groups(size: Size) -> list[range]:
    """Microbatches that pass through all chunks together.

    A stage runs a group through one chunk while the group's first microbatch travels around the
    ring to the next chunk. That takes `num_stages` steps, so groups of exactly that size leave no
    gap. When the count does not divide, groups grow evenly instead: one that is smaller than the
    ring would starve the stages, and with the fixed order of forwards and backwards even deadlock.
    """
    count = max(1, size.num_microbatches // size.num_stages)
    bounds = [size.num_microbatches * i // count for i in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


@lru_cache(maxsize=4)
def _forward_order(size: Size) -> tuple[Action, ...]:
    """Order of all forwards, the same on every stage, so that messages arrive as they are used."""
    return tuple(
        _action("F", chunk, microbatch)
        for group in _groups(size)
        for chunk in range(size.chunks)
        for microbatch in group
    )


@lru_cache(maxsize=4)
def _backward_order(size: Size) -> tuple[Action, ...]:
    return tuple(
        _action("B", chunk, microbatch)
        for group in _groups(size)
        for chunk in reversed(range(size.chunks))
        for microbatch in group
    )


def _alternate(size: Size, warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards left."""
    forwards, backwards = _forward_order(size), _backward_order(size)
    warmup = min(warmup, len(forwards))
    actions = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return [*actions, *backwards[len(forwards) - warmup :]]


def _finish(order: Callable[[Size, int], list[Action]], size: Size) -> Schedule:
    if min(size) < 1:
        raise ConfigError(
            f"a pipeline needs at least one stage, chunk and microbatch, not {size.num_stages}, "
            f"{size.chunks} and {size.num_microbatches}"
        )
    return [_with_messages(order(size, s), size, s) for s in range(size.num_stages)]


def _with_messages(computations: list[Action], size: Size, stage: int) -> list[Action]:
    """Add the messages: each receive one computation ahead, each send right after its maker.

    Chunks from `first` on get an activation and return a gradient; chunks up to `last` pass an
    activation on and get a gradient. Only the two ends of the model do not.
    """
    if size.num_stages == 1:
        return computations
    first = 1 if stage == 0 else 0
    last = size.chunks - 2 if stage == size.num_stages - 1 else size.chunks - 1
    actions: list[Action] = []
    held: tuple[Action, ...] = ()
    for computation in computations:
        op, chunk, microbatch = computation
        fed, read = chunk >= first, chunk <= last
        if op == "B":
            fed, read = read, fed
        if fed:
            actions.append(_action("recv_act" if op == "F" else "recv_grad", chunk, microbatch))
        actions += held
        held = (computation,)
        if read:
            send: Op = "send_act" if op == "F" else "send_grad"
            held = (computation, _action(send, chunk, microbatch))
    return [*actions, *held]


@cache
def _action(op: Op, chunk: int, microbatch: int) -> Action:
    return Action(op, chunk, microbatch)
