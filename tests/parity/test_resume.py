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

from megads.convert.formats import open_source
from megads.convert.run import convert
from megads.convert.source import WriteOptions
from tests import training
from tests.distributed import Workers
from tests.training import (
    assert_same_curve,
    column,
    read_checkpoint,
    read_metrics,
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
    options = [f"parallel=dp2zero{zero}", f"precision={precision}"]
    options += ["precision.loss_scale_window=7"] if precision == "fp16" else []
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
    parts.metrics.close(0)
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


def test_batch_ramp_and_a_changed_batch_size(tmp_path: Path, data: str, workers: Workers) -> None:
    """What was consumed is the sum of the sizes used, and the schedule follows it."""
    ramp = [
        "train.micro_batch_size=2",
        "train.batch_rampup=[4,4,24]",
        "train.global_batch_size=12",
        "optim.units=samples",
        "optim.warmup=8",
        "optim.total=null",
    ]
    config = tiny_config(tmp_path / "a", data, "gpt", SAVE, "train.steps=8", *ramp)
    lines = run_training(workers, config)
    assert [line["samples"] for line in lines] == [4, 8, 12, 20, 28, 40, 52, 64]
    assert lines[1]["lr"] == pytest.approx(3e-3) and lines[-1]["lr"] == pytest.approx(3e-4)

    first = ["train.steps=4", *[o for o in ramp if not o.startswith("optim.total")]]
    run_training(workers, tiny_config(tmp_path / "b", data, "gpt", SAVE, *first, "optim.total=64"))
    changed = ["train.steps=11", "train.global_batch_size=6", "train.batch_rampup=null"]
    changed += [
        "train.micro_batch_size=2",
        "optim.units=samples",
        "optim.warmup=8",
        "optim.total=64",
    ]
    run_training(workers, tiny_config(tmp_path / "b", data, "gpt", SAVE, *changed))
    lines = read_metrics(tmp_path / "b")
    assert column(lines, "samples").tolist() == [4, 8, 12, 20, 26, 32, 38, 44, 50, 56, 62]
    assert lines[4]["lr"] < 3e-3 and lines[-1]["lr"] > 3e-4


def test_metrics_of_steps_that_are_made_again_are_set_aside(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """A run that died after its last checkpoint does not report a step twice."""
    options = ["checkpoint.every=4", "train.steps=6", "optim.total=20"]
    lines = run_training(workers, tiny_config(tmp_path, data, "gpt", *options))
    spoiled = (tmp_path / "metrics.jsonl").read_text() + "\0\0 not json\n"
    (tmp_path / "metrics.jsonl").write_text(spoiled)
    again = run_training(
        workers, tiny_config(tmp_path, data, "gpt", "train.steps=7", *options[:1], *options[2:])
    )
    assert [line["step"] for line in again] == list(range(1, 8))
    assert [line["loss"] for line in again[:6]] == [line["loss"] for line in lines]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded[:2]] == [5, 6]


def resume_error(rank: int, world: int, config: Any) -> str:
    from megads.errors import CheckpointError
    from megads.train.loop import train

    try:
        train(config, training.pool_info(rank, world))
    except CheckpointError as error:
        return str(error)
    return ""


def test_another_optimizer_or_model_is_refused(tmp_path: Path, data: str, workers: Workers) -> None:
    run_training(workers, tiny_config(tmp_path, data, "gpt", SAVE, "train.steps=2"))
    for options, words in (
        (["optim.name=sgd", "optim.momentum=0.9"], ["momentum", "load_what=weights"]),
        (["model.num_layers=4"], ["num_layers", "5", "4"]),
    ):
        config = tiny_config(tmp_path, data, "gpt", "parallel=dp2", "train.steps=4", *options)
        for message in workers(2).run(resume_error, config):
            assert all(word in message for word in words), message


def test_weights_alone_are_no_run_to_go_on_with(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """What most conversions give: the message names the way to begin with them."""
    run_training(workers, tiny_config(tmp_path / "a", data, "gpt", SAVE, "train.steps=2"))
    source = open_source(tmp_path / "a")
    weights = WriteOptions(optimizer=False)
    convert(source, tmp_path / "b", "megads", weights, lambda kind, name: None)
    options = ["train.steps=4", f"checkpoint.load={tmp_path / 'b'}"]
    config = tiny_config(tmp_path / "c", data, "gpt", *options)
    (message,) = workers(1).run(resume_error, config)
    assert "weights alone" in message and "checkpoint.load_what=weights" in message
    options.append("checkpoint.load_what=weights")
    lines = run_training(workers, tiny_config(tmp_path / "c", data, "gpt", *options))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_changed_data_settings_are_pointed_out(
    tmp_path: Path, data: str, workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    from megads.train.checkpointing import _changes, data_settings

    before = data_settings(tiny_config(tmp_path, data, "gpt"))
    after = data_settings(tiny_config(tmp_path, data, "gpt", "train.seq_length=8"))
    assert list(_changes(before, before)) == []
    assert list(_changes(before, after)) == ["train.seq_length has changed from 16 to 8"]
    run_training(workers, tiny_config(tmp_path, data, "gpt", SAVE, "train.steps=2"))
    first = (tmp_path / "config.yaml").read_text()
    run_training(workers, tiny_config(tmp_path, data, "gpt", "train.steps=3", "train.seed=5"))
    assert (tmp_path / "config.before-step-3.yaml").read_text() == first
