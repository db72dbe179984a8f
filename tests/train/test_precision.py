"""Overflow and non-finite values: one decision, on all ranks, in every precision."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Workers
from tests.training import (
    read_checkpoint,
    read_metrics,
    run_training,
    tiny_config,
    train_statuses,
    write_tokens,
)

SAVE = "checkpoint.save_last=true"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def spoil_gradient(rank: int, spoiled_rank: int, step: int, value: float) -> Callable[[], None]:
    """At one step (from 1), one element of one rank's own gradients, of a parameter of which no
    tensor-parallel rank has a copy, gets a value."""
    from megads.zero.grads import BucketReducer, GradientBuckets

    reset, start, steps, done = GradientBuckets.reset, BucketReducer.start, [0], [False]

    def counted_reset(self: GradientBuckets) -> None:
        steps[0] += 1
        reset(self)

    def spoiled_start(self: BucketReducer) -> None:
        alone = [entry for entry in self.bucket.entries if entry.spec.tp_dim is not None]
        if alone and rank == spoiled_rank and steps[0] == step and not done[0]:
            alone[0].grad.view(-1)[0] = value
            done[0] = True
        start(self)

    GradientBuckets.reset = counted_reset  # type: ignore[method-assign]
    BucketReducer.start = spoiled_start  # type: ignore[method-assign]

    def undo() -> None:
        GradientBuckets.reset = reset  # type: ignore[method-assign]
        BucketReducer.start = start  # type: ignore[method-assign]

    return undo


NVME = "parallel.offload=nvme"


@pytest.mark.parametrize(
    "layout,rank",
    [
        ("dp2", 1),
        ("dp2zero1", 0),
        ("tp2", 1),
        ("pp2", 1),
        ("dp2zero2 parallel.offload=cpu", 1),
        (f"dp2zero3 {NVME}", 0),
    ],
)
def test_overflow_on_one_rank_skips_the_step_on_all(
    tmp_path: Path, data: str, workers: Workers, layout: str, rank: int
) -> None:
    options = [
        *f"parallel={layout}".split(),
        "precision=fp16",
        "precision.initial_loss_scale=1024",
        SAVE,
    ]
    clean = run_training(
        workers, tiny_config(tmp_path / "clean", data, "gpt", *options, "train.steps=1")
    )
    config = tiny_config(tmp_path / "run", data, "gpt", *options, "train.steps=2")
    lines = run_training(workers, config, spoil_gradient, rank, 2, math.inf)
    assert [line["skipped"] for line in lines] == [0, 1]
    assert lines[0]["loss"] == clean[0]["loss"]
    before = read_checkpoint(tmp_path / "clean/checkpoints/step-1")
    after = read_checkpoint(tmp_path / "run/checkpoints/step-2")
    assert all(torch.equal(before[key], after[key]) for key in before)

    # The scale is halved once, everywhere, and the next step works; the rate follows the steps.
    lines = run_training(
        workers, tiny_config(tmp_path / "run", data, "gpt", *options, "train.steps=4")
    )
    assert [line["loss_scale"] for line in lines] == [1024, 1024, 512, 512]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert [line["samples"] for line in lines] == [8, 16, 24, 32]
    expected = [3e-3 / 3, 2 * 3e-3 / 3, 3e-3]
    assert [line["lr"] for line in lines[:3]] == pytest.approx(expected)
    changed = read_checkpoint(tmp_path / "run/checkpoints/step-4")
    assert not any(torch.equal(changed[key], after[key]) for key in after)


@pytest.mark.parametrize(
    "layout,rank,precision,clip",
    [
        ("pp2", 1, "fp32", "0"),
        ("pp2", 0, "bf16", "0.5"),
        ("dp2zero1", 1, "fp32", "0.5"),
        ("dp2zero1", 0, "bf16", "0"),
        ("dp2zero3", 1, "bf16", "0.5"),
        (f"dp2zero2 {NVME}", 0, "fp32", "0"),
    ],
)
def test_nan_stops_the_run_and_is_not_saved(
    tmp_path: Path, data: str, workers: Workers, precision: str, clip: str, layout: str, rank: int
) -> None:
    options = [*f"parallel={layout}".split(), f"precision={precision}", f"optim.clip={clip}"]
    config = tiny_config(tmp_path, data, "gpt", *options, "checkpoint.every=1", SAVE)
    statuses = train_statuses(workers, config, spoil_gradient, rank, 3, math.nan)
    assert all(str(s).startswith("BadStepError: step 3") for s in statuses), statuses
    lines = read_metrics(tmp_path)
    assert len(lines) == 3 and math.isnan(lines[2]["grad_norm"]) and lines[2]["skipped"] == 1
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-1", "step-2"]


def test_nan_is_skipped_and_counted_when_asked(tmp_path: Path, data: str, workers: Workers) -> None:
    options = ["parallel=pp2", "train.nonfinite=skip", "train.steps=5", SAVE]
    config = tiny_config(tmp_path, data, "gpt", *options)
    lines = run_training(workers, config, spoil_gradient, 0, 3, math.nan)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert all(math.isfinite(line["loss"]) for line in lines)
    tensors = read_checkpoint(tmp_path / "checkpoints/step-5")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    state = json.loads((tmp_path / "checkpoints/step-5/manifest.json").read_text())["state"]
    assert state["optimizer_updates"] == 4 and state["train"]["step"] == 5


def spoil_weight(rank: int, step: int) -> Callable[[], None]:
    """A weight turns into NaN before a step, so that the loss itself does."""
    from megads.train import loop

    original, count = loop.train_step, [0]

    def train_step(parts: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            for parameter in parts.modules[0].parameters():
                parameter.data.view(-1)[0] = math.nan
        return original(parts, **options)

    loop.train_step = train_step

    def undo() -> None:
        loop.train_step = original

    return undo


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nan_loss_is_logged_as_such(
    tmp_path: Path, data: str, workers: Workers, precision: str
) -> None:
    """With NaN weights fp16 halves its scale down to the minimum and then stops as well."""
    options = [f"precision={precision}", SAVE]
    options += ["precision.initial_loss_scale=2"] if precision == "fp16" else []
    config = tiny_config(tmp_path, data, "gpt", *options)
    (status,) = train_statuses(workers, config, spoil_weight, 3)
    assert str(status).startswith("BadStepError")
    lines = read_metrics(tmp_path)
    assert math.isnan(lines[2]["loss"]) and all("loss" in line for line in lines)
    assert len(lines) == (4 if precision == "fp16" else 3)
    assert not (tmp_path / "checkpoints").exists() or not list(
        (tmp_path / "checkpoints").glob("step-*")
    )


def many_small_updates(rank: int, world: int, precision: str) -> float:
    """One bf16 weight, 100 updates of -1e-3 from 1.0."""
    from megads.config.schema import OptimConfig
    from megads.optim.update import SGD
    from megads.parallel.mesh import Mesh
    from megads.parallel.sharding import Init, ParamSpec
    from megads.zero.buckets import build_buckets
    from megads.zero.optimizer import ZeroOptimizer

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
    spec = ParamSpec("weight", (1,), "norm", Init("ones"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    mesh = Mesh.single()
    module.specs, module.units, module.unit_hooks = {"weight": spec}, {"all": ("weight",)}, None
    buckets = build_buckets([module], mesh, dtype=dtype, bucket_numel=1000, sequence_parallel=False)
    config = OptimConfig(name="sgd", lr=1e-3, weight_decay=0.0)
    optimizer = ZeroOptimizer(
        [module],
        buckets,
        mesh,
        SGD(config),
        config,
        stage=0,
        initialize=lambda entry: entry.param.data.fill_(1.0),
    )
    for _ in range(100):
        optimizer.zero_grad()
        optimizer.gradients.before_backward(0, is_last=True)
        module.weight.sum().backward()
        optimizer.gradients.after_backward(0)
        optimizer.finish_gradients()
        optimizer.step(1e-3)
    return float(module.weight.detach())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_updates_are_not_lost(precision: str) -> None:
    """A hundred of them; naive bf16 would stay at 1."""
    assert many_small_updates(0, 1, precision) == pytest.approx(0.9, abs=2e-3)
    naive = torch.ones((), dtype=torch.bfloat16)
    for _ in range(100):
        naive -= 1e-3
    assert naive == 1
