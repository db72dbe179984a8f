"""A whole run of one process against the dense oracle: data, loss, gradients and updates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megads.data.indexed import IndexedTokens
from megads.data.loader import open_loader
from megads.data.prepare import prepare_data
from tests import training
from tests.distributed import Workers
from tests.parity import dense
from tests.training import FAMILIES, assert_same_curve, run_training, tiny_config, write_tokens


def cosine(n: int) -> float:
    """The rate of update n = 1..20: warmup 3, then from 3e-3 to 3e-4 at update 20."""
    if n < 3:
        return 3e-3 * n / 3
    return 3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + math.cos(math.pi * (n - 3) / 17))


@pytest.mark.parametrize("family", FAMILIES)
def test_run_equals_dense_training(tmp_path: Path, workers: Workers, family: str) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    config = tiny_config(tmp_path / "run", prefix, family)
    (pieces,) = workers(1).run(training.gathered_weights, config, ["param"])
    weights = {
        key.removeprefix("param/"): tensor for key, tensor in training.assemble([pieces]).items()
    }
    for name, tensor in weights.items():
        expected = (1 if name.endswith("norm.weight") else 0) if tensor.dim() == 1 else None
        assert expected is None or bool((tensor == expected).all()), name

    loader = open_loader(config, prepare_data(config), "train")
    ids = torch.tensor(loader.sample_ids(0, 160)).view(20, 8)
    loader.close()
    stream = torch.from_numpy(IndexedTokens(prefix).tokens.astype("int64"))
    batches = [torch.stack([stream[16 * i : 16 * i + 17] for i in row]) for row in ids.tolist()]
    rates = [cosine(n) for n in range(1, 21)]
    want = dense.train(weights, config.model, config.optim, batches, rates)

    got = run_training(workers, config)
    torch.testing.assert_close(training.column(got, "lr"), torch.tensor(rates).double())
    assert_same_curve(got, want, rtol=2e-5)

    # Negative controls: one update's rate, order of samples or weight decay off, and they part.
    late = [rates[0], *rates[:-1]]
    swapped = [batches[1], batches[0], *batches[2:]]
    no_decay = config.optim.model_copy(update={"weight_decay": 0.0})
    for optim, rows, steps in (
        (config.optim, batches, late),
        (config.optim, swapped, rates),
        (no_decay, batches, rates),
    ):
        spoiled = dense.train(weights, config.model, optim, rows, steps)
        with pytest.raises(AssertionError):
            assert_same_curve(got, spoiled, rtol=2e-5)
