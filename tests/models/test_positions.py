"""Rotary tables and ALiBi slopes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megads.config.model import ModelConfig
from megads.models.positions import RotaryTable, alibi_slopes, rotary_frequencies


def rope(**fields: object) -> ModelConfig:
    sizes = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "vocab_size": 7}
    return ModelConfig.model_validate(sizes | {"position": "rope"} | fields)


def test_frequencies_are_a_geometric_series() -> None:
    frequencies = rotary_frequencies(rope(rope_theta=500.0, rope_fraction=0.25))
    assert frequencies.tolist() == pytest.approx([500.0 ** (-i / 8) for i in range(8)])


def test_llama3_scaling_keeps_fast_and_stretches_slow_frequencies() -> None:
    scaling = {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_length": 8192,
    }
    plain = rotary_frequencies(rope(rope_theta=500000.0))
    scaled = rotary_frequencies(rope(rope_theta=500000.0, rope_scaling=scaling))
    seen = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            seen.add("fast")
            assert after == pytest.approx(before)
        elif wavelength > 8192:
            seen.add("slow")
            assert after == pytest.approx(before / 8)
        else:
            seen.add("between")
            smooth = (8192 / wavelength - 1) / 3
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert seen == {"fast", "slow", "between"}


def test_linear_scaling_stretches_positions() -> None:
    plain = RotaryTable(rope())(40, dtype=torch.float64, device=torch.device("cpu"))
    config = rope(rope_scaling={"kind": "linear", "factor": 4.0})
    scaled = RotaryTable(config)(40, dtype=torch.float64, device=torch.device("cpu"))
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a[:10], b[::4])


def test_the_table_is_made_once() -> None:
    table, cpu = RotaryTable(rope()), torch.device("cpu")
    first = table(8, dtype=torch.float32, device=cpu)
    assert table(8, dtype=torch.float32, device=cpu) is first
    assert table(9, dtype=torch.float32, device=cpu)[0].shape == (9, 32)
    assert table(9, dtype=torch.bfloat16, device=cpu)[0].dtype == torch.bfloat16


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    expected = [2.0 ** (-8 * i / 4) for i in range(1, 5)] + [2.0**-1, 2.0**-3]
    assert alibi_slopes(6) == expected
    assert len(set(alibi_slopes(112))) == 112
