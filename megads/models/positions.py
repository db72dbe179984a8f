"""Where a token is: rotary tables and ALiBi slopes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megads.config.model import ModelConfig, RopeScaling


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair, float64 `[rotary_dim / 2]` (Su et al., 2021)."""
    pairs = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-pairs / config.rotary_dim)
    return _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Position interpolation (Chen et al., 2023), or Llama 3's, which interpolates the slow
    frequencies, keeps the fast ones and blends between by the turns in the original context."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_seq_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class RotaryTable:
    """Cosines and sines of positions 0 .. seq-1; the last table made is kept."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._made: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The tables that are kept."""
        return self._made[1] if self._made is not None else ()

    def __call__(
        self, seq: int, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin), each `[seq, rotary_dim / 2]`."""
        wanted = (seq, dtype, device)
        if self._made is None or self._made[0] != wanted:
            with torch.inference_mode(False):  # the model may be trained afterwards
                positions = torch.arange(seq, dtype=torch.float64)
                angles = torch.outer(positions, rotary_frequencies(self._config))
                tables = tuple(t.to(device, dtype) for t in (angles.cos(), angles.sin()))
            self._made = (wanted, (tables[0], tables[1]))
        return self._made[1]


def alibi_slopes(heads: int) -> list[float]:
    """Slope of every head (Press et al., 2022).

    For n heads, n a power of two: 2^(-8 i / n), i = 1 .. n. Otherwise those of the next lower
    power of two, then every other slope of the next higher one.
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return slopes + between
