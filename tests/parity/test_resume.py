"""A run that was stopped and resumed is the run that never stopped.

What goes wrong elsewhere: positions, rates, moments, counters and master weights that are lost,
frozen or restored for some ranks only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import training
from tests.distributed import Workers
from tests.training import (
    assert_same_curve,
    read_checkpoint,
    run_training,
    tiny_config,
    world_size,
    write_tokens,
)

SAVE = "checkpoint.save_last=true"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def stop_and_resume(
    workers: Workers, run: Path, data: str, family: str, first: list[str], then: list[str]
) -> list[dict[str, Any]]:
    """Ten steps under one layout, ten more of the same run under another."""
    run_training(workers, tiny_config(run, data, family, SAVE, "train.steps=10", *first))
    return run_training(workers, tiny_config(run, data, family, SAVE, *then))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_same_layout_is_bitwise_equal(
    tmp_path: Path, data: str, workers: Workers, precision: str, zero: int
) -> None:
    options = [f"parallel=dp2zero{zero}", f"precision={precision}", "precision.loss_scale_window=7"]
    options += ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
    straight = run_training(workers, tiny_config(tmp_path / "a", data, "gpt", SAVE, *options))
    resumed = stop_and_resume(workers, tmp_path / "b", data, "gpt", options, options)
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "samples", "loss_scale", "skipped"):
        assert [line[name] for line in resumed] == [line[name] for line in straight], name
    want = read_checkpoint(tmp_path / "a/checkpoints/step-20")
    got = read_checkpoint(tmp_path / "b/checkpoints/step-20")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    saved = [
        json.loads((tmp_path / f"{run}/checkpoints/step-20/manifest.json").read_text())["state"]
        for run in "ab"
    ]
    for state in saved:
        del state["train"]["run_id"]
    assert saved[0] == saved[1]
    # Nothing in the checkpoint is still what it was before training.
    start = read_checkpoint(tmp_path / "b/checkpoints/step-10")
    assert not any(torch.equal(start[key], want[key]) for key in want)


RESHARDED = {
    "dp2zero1": ["parallel=dp2zero1"],
    "dp4": ["parallel=dp4", "train.micro_batch_size=1"],
    "tp4": ["parallel=tp4"],
    "pp4": ["parallel=pp4"],
    "pp2vpp2": ["parallel=pp2vpp2"],
    "single": [],
}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_other_layouts_continue_the_curve(
    tmp_path: Path, data: str, workers: Workers, family: str
) -> None:
    straight = run_training(workers, tiny_config(tmp_path / "straight", data, family))
    saved = tiny_config(tmp_path / "first", data, family, SAVE, "parallel=tp2pp2", "train.steps=10")
    run_training(workers, saved)
    checkpoint = tmp_path / "first/checkpoints/step-10"
    for name, overrides in RESHARDED.items():
        config = tiny_config(
            tmp_path / name, data, family, f"checkpoint.load={checkpoint}", *overrides
        )
        resumed = run_training(workers, config)
        assert_same_curve(resumed, straight[10:])
        for exact in ("step", "samples", "tokens", "lr"):
            assert [r[exact] for r in resumed] == [s[exact] for s in straight[10:]], (name, exact)
    # Negative control: without the moments the curve is another one.
    forgetful = tiny_config(
        tmp_path / "weights",
        data,
        family,
        f"checkpoint.load={checkpoint}",
        "checkpoint.load_what=weights",
    )
    restarted = run_training(workers, forgetful)
    assert [line["step"] for line in restarted] == list(range(1, 21))
    with pytest.raises(AssertionError):
        assert_same_curve(restarted[:10], straight[10:], rtol=1e-3)


def sample_ids(rank: int, world: int, config: Any, steps: int) -> list[list[int]]:
    """Ids that each of the next steps of a run reads, in full, from the state it resumes with."""
    from megads.train.build import build
    from megads.train.checkpointing import resume

    parts = build(config, training.pool_info(rank, world))
    resume(parts)
    ids = []
    for _ in range(steps):
        batch = parts.batch_plan(parts.state.samples)
        ids.append(parts.loader.sample_ids(parts.state.samples, batch.global_batch_size))
        parts.state.advance(batch)
    parts.loader.close()
    parts.metrics.close()
    parts.close()
    return ids


def test_each_sample_once_per_epoch_across_a_resume(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Epochs of 20 samples or so, a stop in the middle of one, other dp sizes after it."""
    straight = workers(1).run(sample_ids, tiny_config(tmp_path / "a", data, "gpt"), 60)[0]
    stopped = tiny_config(
        tmp_path / "b", data, "gpt", SAVE, "parallel=dp2", "train.steps=9", "optim.total=60"
    )
    run_training(workers, stopped)
    for layout in ("dp2", "dp4", "tp2"):
        options = [f"parallel={layout}", "train.steps=60", "optim.total=60"]
        options += ["train.micro_batch_size=1"]
        config = tiny_config(tmp_path / "b", data, "gpt", *options)
        for ids in workers(world_size(config)).run(sample_ids, config, 51):
            assert ids == straight[9:]
    flat = [i for step in straight for i in step]
    epoch = max(flat) + 1
    for start in range(0, len(flat) - epoch + 1, epoch):
        assert sorted(flat[start : start + epoch]) == list(range(epoch))
    assert len(flat) > 2 * epoch


def digest(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / "checkpoints").rglob("*"))
        if path.is_file()
    }


def test_starting_a_finished_run_again_does_nothing(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Status 0, no step, no file touched."""
    config = tiny_config(tmp_path, data, "gpt", SAVE, "parallel=dp2zero1", "train.steps=5")
    before = run_training(workers, config)
    files = digest(tmp_path)
    assert run_training(workers, config) == before
    assert digest(tmp_path) == files


def test_checkpoint_before_the_first_applied_update_loads(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Steps in fp16 that all overflowed leave an optimizer without updates."""
    huge = ["precision=fp16", "precision.initial_loss_scale=1e30", "precision.min_loss_scale=1e-3"]
    lines = run_training(workers, tiny_config(tmp_path, data, "gpt", SAVE, "train.steps=2", *huge))
    assert [line["skipped"] for line in lines] == [1, 2]
    lines = run_training(workers, tiny_config(tmp_path, data, "gpt", SAVE, "train.steps=3", *huge))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss_scale"] == pytest.approx(2.5e29)
