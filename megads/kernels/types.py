"""Types that kernels share: attention patterns, cross entropy statistics, dropout masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"]


class AttentionPattern:
    """Which keys a query sees, and with what bias: causal, with an optional window and ALiBi.

    `window`: a token sees this many tokens, itself included. `slopes`: ALiBi slope of each local
    head; the bias of key position j is slope x j, which differs from slope x (j - i) only by a
    constant per query and so gives the same softmax (Press et al., 2022).
    """

    def __init__(self, window: int | None = None, slopes: Sequence[float] | None = None) -> None:
        self.window = window
        self.slopes = tuple(slopes) if slopes is not None else None
        self._made: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The bias that is kept."""
        return (self._made[1],) if self._made is not None else ()

    def is_plain_causal(self, seq: int) -> bool:
        """Whether nothing but causality applies at this sequence length."""
        return self.slopes is None and not self.windowed(seq)

    def windowed(self, seq: int) -> bool:
        """Whether the window hides anything at this sequence length."""
        return self.window is not None and self.window < seq

    def bias(self, seq: int, device: torch.device, *, causal: bool) -> Tensor:
        """Additive fp32 bias that broadcasts to `[1, heads, seq, seq]`; -inf hides a key.

        With `causal` future keys are hidden too; without, the caller hides them itself and a plain
        ALiBi bias stays a row per head. The last bias made is kept.
        """
        return self._kept((seq, device, causal), lambda: self._build(seq, device, causal=causal))

    def relative_bias(self, seq: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The causal bias in relative distances, `[1, heads, seq, seq]`, 0 at the query itself.

        What is rounded in a narrow type then is small or matters little. Kept like the other.
        """

        def build() -> Tensor:
            bias = self._build(seq, device, causal=True)
            return (bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]).to(dtype)

        return self._kept((seq, device, dtype), build)

    def _kept(self, wanted: tuple[object, ...], build: Callable[[], Tensor]) -> Tensor:
        if self._made is None or self._made[0] != wanted:
            with torch.inference_mode(False):  # the model may be trained afterwards
                self._made = (wanted, build())
        return self._made[1]

    def _build(self, seq: int, device: torch.device, *, causal: bool) -> Tensor:
        position = torch.arange(seq, device=device)
        bias = torch.zeros(1, 1, 1, seq, device=device)
        if self.slopes is not None:
            slopes = torch.tensor(self.slopes, dtype=torch.float32, device=device)
            bias = slopes.view(1, -1, 1, 1) * position
        distance = position[:, None] - position
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window is not None and self.windowed(seq):
            hidden = hidden | (distance >= self.window)
        elif not causal:
            return bias
        return bias.expand(1, bias.shape[1], seq, seq).masked_fill(hidden, float("-inf"))


class RowStatistics(NamedTuple):
    """What a rank knows of the softmax of each token from its own columns, in fp32 `[tokens]`.

    `maximum` of the logits, `total` = sum of exp(logit - maximum), `target` logit. Without any
    valid column: -inf, 0; without the target among them: 0.
    """

    maximum: Tensor
    total: Tensor
    target: Tensor


class CrossEntropy(Protocol):
    """The two local halves of a cross entropy that works in place on the logits.

    `targets`: int64 `[tokens]`, a local column, or -1 when another rank holds the target. Columns
    from `valid` on are vocabulary padding and take no part.
    """

    def exponentiate_(self, logits: Tensor, targets: Tensor, valid: int) -> RowStatistics:
        """Turn `logits` `[tokens, columns]` into exp(logits - row maximum), padding into 0."""

    def gradient_(
        self, exponentials: Tensor, factor: Tensor, targets: Tensor, at_target: Tensor
    ) -> Tensor:
        """Scale row i by `factor[i]` and write `at_target[i]` where its target is."""


def dropout_mask(
    shape: Sequence[int], probability: float, seed: int, device: torch.device
) -> Tensor:
    """Bool mask of what stays, a pure function of its arguments on one kind of device."""
    source = torch.Generator(device=device).manual_seed(seed)
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=device)
    return mask.bernoulli_(1.0 - probability, generator=source)
