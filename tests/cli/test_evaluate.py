"""`megads-eval`: the loss of a checkpoint in one process is what its run measured in its layout."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.cli.evaluate import main
from megads.data.indexed import TokenWriter
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


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("layout", ["tp2pp2", "dp2zero3"])
def test_equals_the_loss_in_training(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    run, in_training = trained(tmp_path, workers, f"parallel={layout}")
    newest = measured(capsys, str(run))["loss"]
    assert newest["all"] == pytest.approx(in_training[4], rel=1e-5)
    assert set(newest) == {"all", "a", "b"}
    before = measured(capsys, str(run / "checkpoints/step-2"))["loss"]
    assert before["all"] == pytest.approx(in_training[2], rel=1e-5)
    # What is compared would show another checkpoint.
    assert before["all"] != pytest.approx(in_training[4], rel=1e-4)


def test_other_data_and_what_is_printed(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained(tmp_path, workers)
    assert main([str(run), "--data", str(tmp_path / "b"), "--steps", "2", "--batch", "4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{run / 'checkpoints/step-4'}, {2 * 4 * 16} tokens"
    name, _, value, _, perplexity = second.split()
    assert name == "b" and math.exp(float(value)) == pytest.approx(float(perplexity), rel=1e-3)
    sets, every = [str(tmp_path / "a"), str(tmp_path / "b")], ["--steps", "1000"]
    alone = [measured(capsys, str(run), *every, "--data", path) for path in sets]
    output = tmp_path / "both.json"
    both = measured(capsys, str(run), *every, "--data", *sets, "--output", str(output))
    assert json.loads(output.read_text()) == both
    tokens = [each["tokens"] for each in alone]
    losses = [each["loss"][name] for each, name in zip(alone, "ab", strict=True)]
    mean = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    assert both["tokens"] == sum(tokens) and tokens[0] != tokens[1]
    assert both["loss"] == pytest.approx({"all": mean, "a": losses[0], "b": losses[1]}, rel=1e-6)
    assert both["perplexity"] == {name: math.exp(loss) for name, loss in both["loss"].items()}
    narrow = measured(capsys, str(run), *every, "--data", *sets, "--dtype", "bf16")
    assert both["loss"] != narrow["loss"] == pytest.approx(both["loss"], rel=1e-2)


@pytest.mark.parametrize("source", ["files", "streaming"])
def test_the_training_data_may_be_gone(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    """Where other data is evaluated on, named here or as the run's own sets."""
    for name in ("corpus", "held_out"):
        texts = [json.dumps({"text": f"{name} {n} " * 40}) for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    corpus, held_out = (str(tmp_path / f"{name}.jsonl") for name in ("corpus", "held_out"))
    words = [*TRAINED, "model.vocab_size=257", f"data.source={source}"]
    words += [f"data.valid_paths=[{held_out}]", "data.valid_names=[mine]", "eval.steps=2"]
    if source == "files":
        words += ["data.weights=[1]", "data.epochs=5"]
    run_training(workers, tiny_config(tmp_path / "run", corpus, "llama", *words))
    run = str(tmp_path / "run")
    before = measured(capsys, run)["loss"]["mine"], measured(capsys, run, "--data", held_out)
    assert before[0] == before[1]["loss"]["held_out"]
    Path(corpus).unlink()
    assert measured(capsys, run)["loss"]["mine"] == before[0]
    assert measured(capsys, run, "--data", held_out) == before[1]


def test_a_stream_keeps_nothing_back(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "corpus.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"words {n} " * 40}) for n in range(40)))
    words = ["train.steps=1", "model.vocab_size=257", "data.source=streaming", "eval.every=0"]
    words.append("checkpoint.save_last=true")
    run_training(workers, tiny_config(tmp_path / "run", str(text), "llama", *words))
    assert main([str(tmp_path / "run")]) == 2
    assert "a stream keeps nothing back for evaluation; name other" in capsys.readouterr().err


def test_a_set_without_a_sample_is_not_left_out_silently(
    tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained(tmp_path, workers)
    with TokenWriter(tmp_path / "short", np.uint16) as writer:
        writer.add_document(np.arange(5))
    assert main([str(run), "--data", str(tmp_path / "b"), str(tmp_path / "short")]) == 2
    assert "short.bin: 5 tokens in this split, a sample needs" in capsys.readouterr().err


def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main([str(tmp_path / "nothing"), "--tasks", "x"]) == 2
    told = "--tasks needs the package lm_eval: pip install 'megads[eval]'"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--tasks", "x", "--data", "y"], "--data is not for --tasks"),
        (["run", "--num-fewshot", "0"], "--num-fewshot is for --tasks, which is not given"),
        (["run", "--batch", "0"], "--batch: 0 is not 1 or more"),
        (["run", "--steps", "x"], "--steps: invalid number value: 'x'"),
        (["--tasks", "x"], "required: run"),
        (["run", "--output", "no/where.json"], "there is no folder no"),
        (["run", "--output", "/tmp"], "/tmp is a folder"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("abacus", "cuda:77"):
        assert main([str(tmp_path), "--device", name]) == 2
        assert f"--device {name} cannot be used: " in capsys.readouterr().err
