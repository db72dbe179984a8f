"""Sampling text from a language model, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megads.errors import ConfigError

UNFINISHED = "\ufffd"
"""What tokenizers decode the first bytes of a character to, before the others are there."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 takes the most likely one. `top_k` keeps the k most likely (0: all), `top_p` the
    smallest set of most likely ones that holds this probability (Holtzman et al.,
    arXiv:1904.09751). `seed` None draws differently each time. Raises ConfigError naming every
    value that is out of range.
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 0:
            problems.append(f"max-tokens={self.max_tokens} must be 0 or more")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature={self.temperature} must be 0 or more")
        if self.top_k < 0:
            problems.append(f"top-k={self.top_k} must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p={self.top_p} must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    vocab_size: int,
    context: int | None = None,
    eod: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Continue `prompt` with up to `max_tokens` token ids, ending before `eod`.

    `model`: ids `[1, seq]` to logits `[1, seq, vocab]`; only ids below `vocab_size` are chosen.
    `context`: how many of the last tokens the model is shown, None all. The same seed gives the
    same tokens on every device, up to rounding in the logits. Raises ConfigError when the prompt is
    empty.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens, and a model continues at least one")
    source = torch.Generator()
    if sampling.seed is None:
        source.seed()
    else:
        source.manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(sampling.max_tokens):
        shown = ids if context is None else ids[-context:]
        (logits,) = _last_logits(model, [shown], device)
        chosen = choose(logits[:vocab_size], sampling, source)
        if chosen == eod:
            return
        ids.append(chosen)
        yield chosen


def generate_batch(
    model: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab_size: int,
    finished: Callable[[list[int]], bool],
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Continue each prompt until `finished(its new ids)` or by `max_tokens`; the new ids of each.

    A row that is finished leaves the batch. `sampling.seed` None goes on from torch's own seed.
    """
    source = torch.default_generator
    if sampling.seed is not None:
        source = torch.Generator().manual_seed(sampling.seed)
    new: list[list[int]] = [[] for _ in prompts]
    going_on = list(range(len(prompts)))
    for _ in range(sampling.max_tokens):
        rows = [[*prompts[number], *new[number]] for number in going_on]
        for number, logits in zip(going_on, _last_logits(model, rows, device), strict=True):
            new[number].append(choose(logits[:vocab_size], sampling, source))
        going_on = [number for number in going_on if not finished(new[number])]
        if not going_on:
            break
    return new


def padded(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Rows of ids as one tensor `[rows, longest]`, filled up with id 0 behind the end of each.

    That changes nothing in front of it: a token attends to what stands before it, and positions
    count from the left. So no mask is needed, and logits at real tokens are those of the row alone.
    """
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


@torch.inference_mode()
def _last_logits(
    model: Callable[[Tensor], Tensor], rows: Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """Logits behind the last token of each row, `[rows, vocab]`, fp32, on the CPU."""
    logits = model(padded(rows, device))
    last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
    return logits[torch.arange(len(rows), device=logits.device), last].float().cpu()


def choose(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
    """Draw one id from `logits` `[vocab]` (fp32, CPU)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    order = logits.argsort(descending=True, stable=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = logits[order].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities * (before < sampling.top_p)
    return int(order[torch.multinomial(probabilities, 1, generator=source)])


def decode_stream(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Iterable[int]
) -> Iterator[str]:
    """Text as soon as it is certain: a character split over tokens waits for its last one."""
    so_far = list(prompt)
    shown = len(decode(so_far))
    text = ""
    for token in ids:
        so_far.append(token)
        text = decode(so_far)
        if not text.endswith(UNFINISHED) and len(text) > shown:
            yield text[shown:]
            shown = len(text)
    if len(text) > shown:
        yield text[shown:]
