"""How likely a language model finds texts: log-likelihoods of continuations, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megads.errors import DataError
from megads.train.generate import padded


class Pair(NamedTuple):
    """Ids of a context, at least one, and of the continuation that is scored after it."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether greedy decoding would give it."""

    loglikelihood: float
    greedy: bool


@torch.inference_mode()
def score(
    model: Callable[[Tensor], Tensor],
    pairs: Sequence[Pair],
    *,
    max_length: int,
    batch_size: int,
    device: torch.device | str = "cpu",
    report: Callable[[int], object] = lambda count: None,
) -> list[Score]:
    """The score of each continuation after its context, in the order of `pairs`.

    `model`: ids `[batch, seq]` to logits `[batch, seq, vocab]`. A context too long for the model's
    `max_length` positions loses its first tokens; the continuation is never cut. What goes into the
    model is grouped by equal ids, so that answers of one token to the same question cost one pass,
    and by length. `report` is told how many scores have been added. Raises DataError for a context
    or continuation without tokens, and for a continuation that does not fit.
    """
    waiting: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        waiting.setdefault(_input(pair, max_length), []).append(number)
    scores: dict[int, Score] = {}
    longest_first = sorted(waiting, key=len, reverse=True)
    for first in range(0, len(longest_first), batch_size):
        rows = longest_first[first : first + batch_size]
        for row, logits in zip(rows, model(padded(rows, device)), strict=True):
            for number in waiting[row]:
                scores[number] = _scored(logits[: len(row)], pairs[number].continuation)
        report(sum(len(waiting[row]) for row in rows))
    return [scores[number] for number in range(len(pairs))]


def _input(pair: Pair, max_length: int) -> tuple[int, ...]:
    """What the model sees: all but the last token, whose successor nobody asks for."""
    context, continuation = pair
    if not context or not continuation:
        raise DataError(
            f"a context of {len(context)} tokens with a continuation of {len(continuation)} cannot "
            f"be scored; each needs one"
        )
    if len(continuation) > max_length:
        raise DataError(
            f"a continuation of {len(continuation)} tokens does not fit into the {max_length} "
            f"positions of the model"
        )
    return tuple([*context, *continuation][-(max_length + 1) : -1])


def _scored(logits: Tensor, continuation: Sequence[int]) -> Score:
    """From the logits `[seq, vocab]` of an input; the last ones predict the continuation."""
    ids = torch.tensor(continuation, device=logits.device)
    rows = logits[-len(ids) :].float()
    chosen = rows.log_softmax(-1).gather(1, ids[:, None]).sum()
    return Score(float(chosen), bool((rows.argmax(-1) == ids).all()))
