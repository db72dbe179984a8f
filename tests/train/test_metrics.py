"""What a run reports: speed, losses of unevenly masked batches, one line per logged step."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megads.models.flops import forward_flops, training_flops
from megads.train.metrics import Metrics
from megads.train.sinks import Line
from tests import training
from tests.distributed import Workers
from tests.parity import dense
from tests.training import (
    assert_same_curve,
    column,
    run_training,
    tiny_config,
    write_tokens,
)

Losses = list[float]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def timed_by_hand(rank: int) -> Callable[[], None]:
    """A clock that only steps, evaluations and saves move: by 1, 100 and 10,000 seconds."""
    from megads.train import loop, timing

    now, changed = [1e6], pytest.MonkeyPatch()
    changed.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return function(*args, **kwargs)

        return slow

    for name, seconds in (("train_step", 1.0), ("evaluate", 100.0), ("save", 10_000.0)):
        changed.setattr(loop, name, taking(seconds, getattr(loop, name)))
    return changed.undo


def test_speed_counts_each_token_once_and_steps_alone(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Two samples of 16 tokens in a microbatch, three microbatches, two replicas of four ranks:
    192 tokens for the job in a step of a second, the first after a resume like any other."""
    words = ["parallel=tp2pp2dp2", "train.micro_batch_size=2", "train.global_batch_size=12"]
    words += ["train.recompute=full", "train.recompute_layers=2", "logging.peak_tflops=1e-6"]
    words += ["eval.every=1", "eval.steps=1", "checkpoint.every=1", "data.valid_fraction=0.3"]
    for steps in (2, 3):
        config = tiny_config(tmp_path, data, "gpt", *words, f"train.steps={steps}")
        lines = run_training(workers, config, timed_by_hand)
    assert column(lines, "tokens_per_second").tolist() == [192.0] * 3
    assert column(lines, "tokens").tolist() == [192, 384, 576]
    assert column(lines, "step_time_s").tolist() == [1.0] * 3
    assert [line["save_s"] for line in lines if "loss" in line] == [0.0, 10_000.0, 0.0]
    model = training_flops(config.model, 12, 16) / 8 / 1e6  # of the peak of a device, 1e6 FLOP/s
    again = 4 * forward_flops(config.model, 12, 16).block / 8 / 1e6  # 2 layers of each stage
    assert column(lines, "mfu").tolist() == pytest.approx([model] * 3)
    assert column(lines, "hfu").tolist() == pytest.approx([model + again] * 3)


class Recorder:
    """A sink that writes what it gets into a file."""

    def __init__(self, path: Path, *_: object) -> None:
        self._file = path.open("w")

    def rewind(self, step: int, made: int) -> None:
        pass

    def record(self, line: Line) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self, status: int) -> None:
        self._file.close()


def everything_recorded(rank: int, folder: Path) -> Callable[[], None]:
    """What this rank prints and sends to loggers is in files of `folder`."""
    from megads.train import metrics

    changed = pytest.MonkeyPatch()
    changed.setattr(sys, "stdout", (folder / f"stdout {rank}").open("w", buffering=1))
    for name in ("WandbRun", "TensorBoard"):
        changed.setattr(metrics, name, partial(Recorder, folder / f"{name} {rank}"))
    return changed.undo


@pytest.fixture(scope="module")
def dense_losses(data: str, workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Of the first two batches of 8 samples, with the initial weights."""
    config = tiny_config(tmp_path_factory.mktemp("dense"), data, "gpt")
    (pieces,) = workers(1).run(training.gathered_weights, config, ["param"])
    weights = {k.removeprefix("param/"): v for k, v in training.assemble([pieces]).items()}
    from megads.data.loader import open_loader
    from megads.data.prepare import prepare_data

    with contextlib.closing(open_loader(config, prepare_data(config), "train")) as loader:
        batches = [m for step in range(2) for m in loader.batches(8 * step, 8, 8, 1, 0)]
    return [
        F.cross_entropy(
            dense.logits(weights, config.model, batch.tokens).flatten(0, 1), batch.labels.flatten()
        ).item()
        for batch in batches
    ]


@pytest.mark.parametrize("layout", ["pp2", "tp2", "dp2"])
def test_one_process_reports_the_loss_of_the_whole_batch(
    tmp_path: Path, data: str, workers: Workers, layout: str, dense_losses: Losses
) -> None:
    words = [f"parallel={layout}", "train.steps=2", "optim.lr=0", "optim.min_lr=0"]
    words += ["train.micro_batch_size=2", "logging.loggers=[wandb,tensorboard]"]
    config = tiny_config(tmp_path / "run", data, "gpt", *words)
    lines = run_training(workers, config, everything_recorded, tmp_path)
    assert column(lines, "loss").tolist() == pytest.approx(dense_losses, rel=1e-5)
    files = {path.name for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size}
    assert files == {"stdout 0", "WandbRun 0", "TensorBoard 0"}
    for name in ("WandbRun 0", "TensorBoard 0"):
        assert [json.loads(line) for line in (tmp_path / name).open()] == lines
    printed = re.findall(r"^step (\d)/2  loss (\S+)", (tmp_path / "stdout 0").read_text(), re.M)
    assert printed == [(str(line["step"]), f"{line['loss']:.4f}") for line in lines]


FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "step_time_s",
    "data_wait_s",
    "save_s",
    "phases_s",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "hfu",
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


def test_a_terminal_that_is_gone_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def step(self, line: object, total_steps: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def note(self, text: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def close(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("megads.train.metrics.open_display", Gone)
    metrics = Metrics(tmp_path)
    metrics.note("going on")
    metrics.step({"step": 1, "loss": 2.0}, 1)
    metrics.evaluation(1, 2.0)
    metrics.close(0)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
