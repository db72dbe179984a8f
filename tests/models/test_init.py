"""Initial weights: the same for every layout, with the configured spread."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.models import init
from megads.models.families import param_specs
from megads.models.init import initialize_parameter
from megads.parallel.sharding import Init, ParamSpec
from tests.models.stages import local_piece

CONFIG = ModelConfig.model_validate(
    {
        "num_layers": 5,
        "hidden_size": 40,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "ffn_hidden_size": 72,
        "activation": "swiglu",
        "qk_norm": True,
        "vocab_size": 101,
        "vocab_multiple": 8,
        "tie_embeddings": False,
    }
)
SPECS = {spec.name: spec for spec in param_specs(CONFIG)}


def draw(
    spec: ParamSpec,
    tp: int = 1,
    index: int = 0,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    local = torch.full(spec.local_shape(tp), float("nan"), dtype=dtype)
    initialize_parameter(local, spec, seed=seed, tp=tp, tp_index=index)
    return local


def draw_global(spec: ParamSpec, **options: int) -> Tensor:
    return draw(spec, **options)[: spec.shape[0]]  # type: ignore[arg-type]


@pytest.mark.parametrize("block_elements", [1 << 20, 400, 7])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_layout_slices_the_same_draws(
    monkeypatch: pytest.MonkeyPatch, tp: int, block_elements: int
) -> None:
    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", block_elements)
    for spec in SPECS.values():
        full = draw_global(spec)
        for index in range(tp):
            expected = local_piece(spec, full, tp, index).nan_to_num(nan=0.0)
            assert torch.equal(draw(spec, tp, index), expected)


def test_only_the_needed_blocks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_BLOCK_ELEMENTS", 400)
    drawn: list[int] = []
    real = init._draw

    def count(spec: ParamSpec, seed: int, block: int) -> Tensor:
        drawn.append(block)
        return real(spec, seed, block)

    monkeypatch.setattr(init, "_draw", count)
    draw(SPECS["head.weight"], tp=4, index=1)
    assert drawn == [3, 4, 5, 6]  # rows 32 .. 63 in blocks of 10


def test_no_two_tensors_and_no_two_shards_are_equal() -> None:
    """One draw per parameter name and row: not per rank, not per stage."""
    rows: list[tuple[float, ...]] = []
    for spec in SPECS.values():
        if spec.init.kind == "normal":
            rows += [tuple(row.tolist()) for row in draw_global(spec)]
    assert len(set(rows)) == len(rows)
    assert not torch.equal(
        draw_global(SPECS["head.weight"]), draw_global(SPECS["head.weight"], seed=2)
    )


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv", "blocks.4.attn.out", "blocks.2.mlp.down"])
def test_spread(name: str) -> None:
    """Normal with the configured std; output projections by the model's depth, not the stage's."""
    spec = SPECS[f"{name}.weight"]
    std = 0.02 if name.endswith("qkv") else 0.02 / math.sqrt(10)
    values = draw_global(spec)
    count = values.numel()
    assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * count)
    assert abs(values.mean()) < 5 * std / math.sqrt(count)
    assert abs(values.pow(4).mean() / std**4 - 3) < 5 * math.sqrt(96 / count)


def test_norms_and_biases() -> None:
    for spec in SPECS.values():
        if spec.role in ("norm", "bias"):
            one = spec.name.endswith("norm.weight")
            assert torch.equal(draw_global(spec), torch.full(spec.shape, float(one)))


def test_narrow_types_round_the_same_draws() -> None:
    spec = SPECS["blocks.0.mlp.up.weight"]
    assert torch.equal(draw(spec, dtype=torch.bfloat16), draw(spec).bfloat16())


def test_one_dimensional_normal() -> None:
    spec = ParamSpec("x", (50,), "bias", Init("normal", 1.0), tp_dim=0)
    assert torch.equal(torch.cat([draw(spec, 2, i) for i in range(2)]), draw(spec))
