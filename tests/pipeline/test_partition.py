"""Stage splits: every layer once, balanced by cost, exact optimum against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from megads.config.model import ModelConfig
from megads.errors import LayoutError
from megads.pipeline.partition import (
    estimate_cost,
    plan_stages,
    virtual_stage_costs,
)


def model(layers: int, *, hidden: int = 64, vocab: int = 211, **more: object) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=4, vocab_size=vocab, **more
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        bounds = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def slowest_stage(split: tuple[int, ...], config: ModelConfig, pp: int, seq: int) -> int:
    plan = plan_stages(config, pp, len(split) // pp, seq, split)
    costs = virtual_stage_costs(config, plan, seq)
    return max(sum(costs[stage::pp]) for stage in range(pp))


def test_the_head_of_a_large_vocabulary_counts_as_layers() -> None:
    config = ModelConfig(num_layers=8, hidden_size=512, num_attention_heads=8, vocab_size=32000)
    assert plan_stages(config, 2, 1, 512).split == (6, 2)
    small = ModelConfig(num_layers=8, hidden_size=512, num_attention_heads=8, vocab_size=256)
    assert plan_stages(small, 2, 1, 512).split == (4, 4)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"), [(5, 2, (3, 2)), (30, 4, None), (10, 3, None), (7, 7, (1,) * 7)]
)
def test_layers_that_do_not_divide(layers: int, pp: int, expected: tuple[int, ...] | None) -> None:
    plan = plan_stages(model(layers), pp, 1, 16)
    assert [i for c in plan.assignments for i in c.layers] == list(range(layers))
    assert max(plan.split) - min(plan.split) <= 1
    if expected:
        assert plan.split == expected


def test_no_split_of_any_kind_has_a_faster_slowest_stage() -> None:
    draw = random.Random(5)
    for _ in range(40):
        pp, chunks = draw.randint(1, 4), draw.randint(1, 2)
        layers = draw.randint(pp * chunks, 10)
        config = model(layers, hidden=4 * draw.randint(2, 40), vocab=draw.randint(10, 20000))
        best = min(
            slowest_stage(split, config, pp, 33) for split in compositions(layers, pp * chunks)
        )
        assert slowest_stage(plan_stages(config, pp, chunks, 33).split, config, pp, 33) == best


def test_equal_stages_give_the_extra_layer_to_the_later_one() -> None:
    # A head about as heavy as several layers leaves stages 0..2 to share; stage 0 also embeds.
    plan = plan_stages(model(8, vocab=6000), 4, 1, 16)
    assert plan.split == (2, 2, 3, 1)


def test_chunks_lie_around_the_ring() -> None:
    plan = plan_stages(model(13), 3, 2, 16)
    for stage in range(3):
        for chunk, part in enumerate(plan.chunks_of(stage)):
            assert (part.stage, part.chunk) == (stage, chunk)
            assert part.virtual_stage == chunk * 3 + stage
            assert len(part.layers) >= 1
    embeds = [c.virtual_stage for c in plan.assignments if c.has_embedding]
    heads = [c.virtual_stage for c in plan.assignments if c.has_head]
    assert (embeds, heads) == ([0], [5])


def test_a_given_split_is_used_as_it_is() -> None:
    assert plan_stages(model(5), 3, 1, 16, (1, 3, 1)).split == (1, 3, 1)
    ends = plan_stages(model(5), 2, 2, 16, [0, 3, 2, 0])
    assert [list(c.layers) for c in ends.assignments] == [[], [0, 1, 2], [3, 4], []]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((3, 1), "places 4 layers; model.num_layers=5"),
        ((3, 3), "places 6 layers"),
        ((2, 2, 1), "has 3 entries.*= 2"),
        ((6, -1), "each placed once"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_stages(model(5), 2, 1, 16, split)


def test_an_empty_stage_inside_is_refused() -> None:
    with pytest.raises(LayoutError, match="inner virtual stage"):
        plan_stages(model(5), 3, 1, 16, (3, 0, 2))


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(3, 4, 1), (7, 4, 2)])
def test_more_virtual_stages_than_layers_are_refused(layers: int, pp: int, chunks: int) -> None:
    with pytest.raises(LayoutError, match=f"num_layers={layers} is fewer than the {pp * chunks}"):
        plan_stages(model(layers), pp, chunks, 16)


def test_costs_by_hand() -> None:
    config = model(1, hidden=8, vocab=10, num_kv_heads=2, activation="swiglu", ffn_hidden_size=12)
    matrices = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12
    attention = 2 * 8 * 6
    elements = 10 * 8 + 2 * 24 + 2 * (8 + 8)
    cost = estimate_cost(config, seq_length=6)
    assert cost.block == 2 * (matrices + attention) + 16 * elements
    assert cost.head == 2 * 8 * 10 + 16 * (30 + 16)
    windowed = config.model_copy(update={"attention_window": 3})
    assert cost.block - estimate_cost(windowed, seq_length=6).block == 4 * 8 * 3
