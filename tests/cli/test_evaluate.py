"""`megads-eval`: the loss of a checkpoint in one process is what its run measured in its layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megads.cli.evaluate import main
from tests.distributed import Workers
from tests.training import run_training, tiny_config, write_tokens

TRAINED = ["train.steps=4", "eval.every=2", "eval.steps=3", "checkpoint.every=2"]


def trained(tmp_path: Path, workers: Workers, *overrides: str) -> tuple[Path, dict[int, float]]:
    """A run of two sources, and its validation losses by step."""
    data = [write_tokens(tmp_path / name, documents=n) for name, n in (("a", 40), ("b", 25))]
    run = tmp_path / "run"
    words = [*TRAINED, f"data.paths=[{','.join(data)}]", "data.valid_fraction=0.3", *overrides]
    lines = run_training(workers, tiny_config(run, data[0], "llama", *words))
    return run, {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def loss(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main([*arguments, "--json"]) == 0
    losses: dict[str, float] = json.loads(capsys.readouterr().out)["loss"]
    return losses


@pytest.mark.parametrize("layout", ["tp2pp2", "dp2zero3"])
def test_equals_the_loss_in_training(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    run, measured = trained(tmp_path, workers, f"parallel={layout}")
    newest = loss(capsys, str(run))
    assert newest["all"] == pytest.approx(measured[4], rel=1e-5)
    assert set(newest) == {"all", "a", "b"}
    before = loss(capsys, str(run / "checkpoints/step-2"))
    assert before["all"] == pytest.approx(measured[2], rel=1e-5)
    # What is compared would show another checkpoint.
    assert before["all"] != pytest.approx(measured[4], rel=1e-4)


def test_other_data_and_what_is_printed(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained(tmp_path, workers)
    assert main([str(run), "--data", str(tmp_path / "b"), "--steps", "2", "--batch", "4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{run / 'checkpoints/step-4'}, {2 * 4 * 16} tokens"
    name, _, value, _, perplexity = second.split()
    assert name == "b" and math.exp(float(value)) == pytest.approx(float(perplexity), rel=1e-3)


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err
