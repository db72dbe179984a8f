"""What a run reports: speed, losses of unevenly masked batches, one line per logged step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megads.train.metrics import Metrics
from tests import training
from tests.distributed import Workers
from tests.parity import dense
from tests.training import (
    assert_same_curve,
    column,
    read_metrics,
    run_training,
    tiny_config,
    write_tokens,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def fake_clock(rank: int) -> Callable[[], None]:
    """Every look at the clock is one second after the one before."""
    from megads.train import loop

    original, ticks = loop.time.perf_counter, itertools.count()
    loop.time.perf_counter = lambda: float(next(ticks))

    def undo() -> None:
        loop.time.perf_counter = original

    return undo


@pytest.mark.parametrize(
    "layout,expected", [("dp2", 192), ("tp2", 96), ("pp2", 96), ("tp2pp2", 96), ("tp2dp2", 192)]
)
def test_tokens_per_second_counts_each_token_once(
    tmp_path: Path, data: str, workers: Workers, layout: str, expected: int
) -> None:
    """Microbatches of 2, accumulation 3, sequences of 16: 96 tokens for each dp rank."""
    dp = 2 if "dp2" in layout else 1
    options = [f"parallel={layout}", f"train.global_batch_size={6 * dp}", "train.steps=3"]
    options.append("train.micro_batch_size=2")
    lines = run_training(workers, tiny_config(tmp_path, data, "gpt", *options), fake_clock)
    assert column(lines, "tokens_per_second").tolist() == [expected] * 3
    assert column(lines, "tokens").tolist() == [expected, 2 * expected, 3 * expected]
    assert column(lines, "step_time_s").tolist() == [1.0] * 3


FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "step_time_s",
    "data_wait_s",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "loss_scale",
    "skipped",
    "peak_memory_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "host_bytes",
    "file_bytes",
}


def test_one_line_per_logged_step_and_evaluation(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    options = ["parallel=tp2pp2", "train.steps=7", "logging.every=2", "eval.every=3"]
    options += ["eval.steps=1", "data.valid_fraction=0.3"]
    lines = run_training(workers, tiny_config(tmp_path, data, "gpt", *options))
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6]
    assert all(set(line) == FIELDS for line in steps)
    assert all(line["mfu"] is None for line in steps), "the peak of this CPU is not known"
    assert all(line["peak_memory_bytes"] > 50e6 for line in steps)
    assert all(2 * line["parameter_bytes"] == line["optimizer_bytes"] > 0 for line in steps)
    evaluations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 7]
    for line in evaluations:
        assert line["val_ppl"] == pytest.approx(math.exp(line["val_loss"]))


@pytest.mark.parametrize("samples", ["fewer than a batch", "plenty"])
def test_evaluation_is_the_mean_over_the_samples(
    tmp_path: Path, data: str, workers: Workers, samples: str
) -> None:
    """The same number on every layout, equal to the dense mean over counted samples."""
    fraction = "0.05" if samples == "fewer than a batch" else "0.5"
    options = [f"data.valid_fraction={fraction}", "eval.every=1", "eval.steps=2", "train.steps=1"]
    options += ["optim.lr=0", "optim.min_lr=0"]
    values = {}
    for layout in ("single", "dp2", "pp2", "tp2"):
        config = tiny_config(tmp_path / layout, data, "gpt", f"parallel={layout}", *options)
        values[layout] = column(run_training(workers, config), "val_loss").item()
    (pieces,) = workers(1).run(
        training.gathered_weights,
        tiny_config(tmp_path / "weights", data, "gpt", *options),
        ["param"],
    )
    weights = {k.removeprefix("param/"): v for k, v in training.assemble([pieces]).items()}

    from megads.data.loader import open_loader
    from megads.data.prepare import prepare_data

    config = tiny_config(tmp_path / "weights", data, "gpt", *options)
    loader = open_loader(config, prepare_data(config), "valid")
    count = min(loader.num_samples, 16)
    assert ((count < 8) == (samples == "fewer than a batch") and count % 8) or count == 16
    source = loader.sources[0]
    rows = torch.stack([torch.from_numpy(source.read(i)) for i in loader.sample_ids(0, count)])
    loader.close()
    predicted = dense.logits(weights, config.model, rows[:, :-1])
    expected = F.cross_entropy(predicted.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert values == pytest.approx(dict.fromkeys(values, expected), rel=1e-5)


def mask_unevenly(rank: int) -> Callable[[], None]:
    """Samples get loss masks of very different sizes, some none at all."""
    from megads.data.loader import TokenLoader

    original = TokenLoader.batches

    def batches(self: TokenLoader, *args: int) -> Any:
        result = original(self, *args)
        for microbatch in result:
            microbatch.loss_mask = uneven_mask(microbatch.tokens)
        return result

    TokenLoader.batches = batches  # type: ignore[method-assign]

    def undo() -> None:
        TokenLoader.batches = original  # type: ignore[method-assign]

    return undo


def uneven_mask(tokens: torch.Tensor) -> torch.Tensor:
    whole_sample = (tokens[:, :1] % 3 == 0).float()
    return (tokens % 4 == 1).float() * (1 - whole_sample)


def test_loss_is_the_mean_over_tokens_not_a_mean_of_means(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Unequal numbers of loss tokens on ranks and microbatches, also zero."""
    curves = {}
    for name, options in {
        "single": [],
        "one by one": ["train.micro_batch_size=1"],
        "dp2": ["parallel=dp2zero1"],
        "dp4": ["parallel=dp4", "train.micro_batch_size=2"],
        "pp2": ["parallel=pp2", "train.micro_batch_size=1"],
    }.items():
        config = tiny_config(tmp_path / name, data, "gpt", *options)
        curves[name] = run_training(workers, config, mask_unevenly)
    for name in curves:
        assert_same_curve(curves[name], curves["single"])

    config = tiny_config(tmp_path / "weights", data, "gpt")
    (pieces,) = workers(1).run(training.gathered_weights, config, ["param"])
    weights = {k.removeprefix("param/"): v for k, v in training.assemble([pieces]).items()}
    from megads.data.loader import open_loader
    from megads.data.prepare import prepare_data

    loader = open_loader(config, prepare_data(config), "train")
    microbatches = loader.batches(0, 8, 2, 1, 0)
    loader.close()
    tokens = torch.cat([m.tokens for m in microbatches])
    labels = torch.cat([m.labels for m in microbatches])
    predicted = dense.logits(weights, config.model, tokens)
    losses = F.cross_entropy(predicted.flatten(0, 1), labels.flatten(), reduction="none")
    mask = uneven_mask(tokens)
    pooled = (losses.view_as(mask) * mask).sum() / mask.sum()
    assert curves["single"][0]["loss"] == pytest.approx(pooled.item(), rel=1e-5)
    means = [(losses.view_as(mask)[i] * mask[i]).sum() / mask[i].sum() for i in range(8)]
    of_means = torch.stack([m for m in means if m.isfinite()]).mean()
    assert abs(of_means - pooled) > 1e-3 and any(not m.isfinite() for m in means)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    metrics = Metrics(path, writes=True)
    metrics.evaluation(3, 1.5)
    metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
