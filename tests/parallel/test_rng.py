"""Seeds are a pure function of what they are for."""

from __future__ import annotations

import itertools

import pytest
import torch

from megads.parallel.rng import DropoutRng, derive_seed, generator


def test_seeds_never_change() -> None:
    """Initial weights of recorded runs depend on these values."""
    assert derive_seed(1234, "embedding.word.weight", 0) == 732_718_029_318_824_568
    assert 0 <= derive_seed() < 2**63


def test_every_part_and_its_place_counts() -> None:
    parts = [(), (0,), (1,), ("1",), (1, 2), (2, 1), (12,), ("a", "b"), ("ab",), ("a", "b", 0)]
    assert len({derive_seed(*p) for p in parts}) == len(parts)


def test_generator_starts_from_its_seed() -> None:
    a, b = (torch.rand(5, generator=generator(7)) for _ in range(2))
    assert torch.equal(a, b)


def test_dropout_sites_differ() -> None:
    """Over steps, microbatches, layers, sites; over ranks only where activations are sharded."""
    seeds = {}
    for step, micro, rank in itertools.product(range(2), range(2), range(2)):
        rng = DropoutRng(tp_index=rank)
        rng.seed(1234, step, micro)
        for layer, name, sharded in itertools.product((-1, 0), ("a", "b"), (False, True)):
            where = (step, micro, layer, name, sharded, rank if sharded else 0)
            seed = rng.key.site(layer, name, sharded=sharded)
            assert seeds.setdefault(where, seed) == seed
    assert len(set(seeds.values())) == len(seeds)


def test_an_earlier_key_stays_what_it_was() -> None:
    rng = DropoutRng()
    rng.seed(1, 2, 3)
    key, before = rng.key, rng.key.site(0, "a", sharded=False)
    rng.seed(1, 2, 4)
    assert key.site(0, "a", sharded=False) == before != rng.key.site(0, "a", sharded=False)


def test_dropout_without_a_seed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="seed was not called"):
        _ = DropoutRng().key
