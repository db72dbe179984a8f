"""A checkpoint belongs to no ZeRO stage and to no place of the state: any run goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import Workers
from tests.training import (
    assert_same_curve,
    read_checkpoint,
    run_training,
    tiny_config,
    write_tokens,
)

SMALL = ["parallel.bucket_mb=0.004", "parallel.offload_budget_mb=0.05"]
SAVE = "checkpoint.save_last=true"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_other_stages_and_offloads_continue_the_curve(
    tmp_path: Path, data: str, workers: Workers, family: str
) -> None:
    """Five steps each of one run that is stopped and goes on in another form."""
    total = [SAVE, "optim.total=25"]
    straight = run_training(
        workers, tiny_config(tmp_path / "straight", data, family, *total, "train.steps=25")
    )
    forms = [
        ["parallel=dp2"],
        ["parallel=dp2zero3", "parallel.offload=nvme", "train.micro_batch_size=1"],
        ["parallel=tp2dp2zero2", "train.micro_batch_size=2"],
        ["parallel=dp2zero1", "parallel.offload=cpu"],
        [],
    ]
    for number, form in enumerate(forms, 1):
        options = [*total, f"train.steps={5 * number}", *form, *SMALL]
        lines = run_training(workers, tiny_config(tmp_path / "changing", data, family, *options))
    assert [line["step"] for line in lines] == list(range(1, 26))
    assert_same_curve(lines, straight)
    for exact in ("samples", "tokens", "lr"):
        assert [a[exact] for a in lines] == [b[exact] for b in straight], exact


def test_negative_control_moments_that_are_lost_are_noticed(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    straight = run_training(workers, tiny_config(tmp_path / "straight", data, "gpt"))
    first = tiny_config(tmp_path / "first", data, "gpt", SAVE, "parallel=dp2", "train.steps=10")
    run_training(workers, first)
    options = ["parallel=dp2zero3", "parallel.offload=nvme", *SMALL]
    for what, is_same in (("all", True), ("weights", False)):
        load = [f"checkpoint.load={tmp_path / 'first'}", f"checkpoint.load_what={what}"]
        got = run_training(workers, tiny_config(tmp_path / what, data, "gpt", *options, *load))
        if is_same:
            assert_same_curve(got, straight[10:])
        else:
            with pytest.raises(AssertionError):
                assert_same_curve(got[:10], straight[10:], rtol=1e-3)


@pytest.mark.parametrize(
    "form",
    [
        "parallel=dp2zero2",
        "parallel=dp2zero3 parallel.offload=nvme",
        "parallel=dp2zero3 precision=bf16",
        "parallel=dp2zero2 parallel.offload=nvme precision=bf16",
    ],
)
def test_the_same_form_is_bitwise_equal(
    tmp_path: Path, data: str, workers: Workers, form: str
) -> None:
    options = [*form.split(), *SMALL, SAVE, "train.micro_batch_size=2", "optim.total=8"]
    options += ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]

    def run(name: str, steps: int) -> list[dict[str, float]]:
        config = tiny_config(tmp_path / name, data, "gpt", *options, f"train.steps={steps}")
        return run_training(workers, config)

    straight = run("straight", 8)
    run("stopped", 4)
    resumed = run("stopped", 8)
    for name in ("step", "loss", "grad_norm", "lr", "samples"):
        assert [line[name] for line in resumed] == [line[name] for line in straight], name
    want = read_checkpoint(tmp_path / "straight/checkpoints/step-8")
    got = read_checkpoint(tmp_path / "stopped/checkpoints/step-8")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_loaded_weights_are_the_masters(tmp_path: Path, data: str, workers: Workers) -> None:
    """A step at rate 0 after loading weights only changes no bit, and fills the moments."""
    run_training(workers, tiny_config(tmp_path / "a", data, "gpt", SAVE, "train.steps=3"))
    loaded = read_checkpoint(tmp_path / "a/checkpoints/step-3")
    forms = [
        ("dp2zero2", "none", "fp32"),
        ("dp2zero3", "none", "bf16"),
        ("dp2zero3", "cpu", "fp32"),
        ("dp2zero3", "nvme", "bf16"),
        ("dp2zero1", "nvme", "fp16"),
        ("dp2", "cpu", "bf16"),
        ("dp2", "none", "fp32"),
        ("dp2", "none", "bf16"),
        ("dp2", "none", "fp16"),
        ("dp2zero1", "none", "fp32"),
        ("dp2zero1", "none", "bf16"),
        ("dp2zero1", "none", "fp16"),
    ]
    for number, (layout, offload, precision) in enumerate(forms):
        config = tiny_config(
            tmp_path / f"{number}",
            data,
            "gpt",
            SAVE,
            *SMALL,
            f"parallel={layout}",
            f"parallel.offload={offload}",
            f"precision={precision}",
            f"checkpoint.load={tmp_path / 'a'}",
            "checkpoint.load_what=weights",
            "optim.lr=0",
            "optim.min_lr=0",
            "train.steps=1",
        )
        (line,) = run_training(workers, config)
        assert line["skipped"] == 0
        after = read_checkpoint(tmp_path / f"{number}/checkpoints/step-1")
        weights = [key for key in loaded if key.startswith("param/")]
        assert all(torch.equal(after[key], loaded[key]) for key in weights)
        moments = [key for key in after if key.startswith("exp_avg/")]
        assert all(after[key].any() and not torch.equal(after[key], loaded[key]) for key in moments)
