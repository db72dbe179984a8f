"""What holds for all formats: checks of a result, types, options, and what is on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megads.config.model import ModelConfig
from megads.convert import run
from megads.convert.formats import open_source
from megads.convert.narrow import retype
from megads.convert.run import check_equal, convert
from megads.convert.source import ReadOptions, Source, Trained, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.train import agreement
from megads.train.agreement import compare_logits
from tests.convert.hf_models import InMemory
from tests.convert.test_hf_write import GPT, LLAMA, model_of
from tests.models.stages import random_weights

MODEL = model_of(GPT, hidden_dropout=0.1)


class WithMoments(InMemory):
    """The same numbers as weights and as moments."""

    kinds = ("param", "exp_avg", "exp_avg_sq")


def written(source: Source, target: Path, to: str, options: WriteOptions | None = None) -> Source:
    convert(source, target, to, options or WriteOptions(), lambda kind, name: None)
    return open_source(target, to)


@pytest.fixture
def source() -> WithMoments:
    return WithMoments(MODEL, random_weights(MODEL))


def test_what_is_equal(tmp_path: Path, source: WithMoments) -> None:
    count = len(param_specs(MODEL))
    bare = WriteOptions(optimizer=False)
    narrow = WriteOptions(torch.bfloat16)
    whole = written(source, tmp_path / "whole", "megads")
    assert check_equal(source, whole, WriteOptions()) == 3 * count
    assert check_equal(source, written(source, tmp_path / "bare", "megads", bare), bare) == count
    result = written(source, tmp_path / "narrow", "megads", narrow)
    assert check_equal(source, result, narrow) == 3 * count
    assert result.dtype("exp_avg", "final_norm.bias") == torch.float32
    assert check_equal(source, written(source, tmp_path / "hf", "hf"), WriteOptions()) == count


@pytest.mark.parametrize("to", ["megads", "hf"])
@pytest.mark.parametrize(
    "wrong, problem",
    [
        (lambda s, r: setattr(r, "model", _with(r.model, norm_eps=1e-3)), "norm_eps=0.001 inst"),
        (lambda s, r: setattr(r, "model", _with(r.model, vocab_size=99)), "vocab_size=99"),
        (lambda s, r: setattr(s, "precision", torch.float16), r"float32 instead of .*float16"),
        (lambda s, r: s.tensors["final_norm.bias"].add_(1), "param of final_norm.bias is not"),
        (lambda s, r: s.tensors["final_norm.bias"].copy_(-0.0), "final_norm.bias is not"),
        (lambda s, r: setattr(r, "kinds", ("param", "exp_avg")), "lacks exp_avg_sq"),
        (lambda s, r: setattr(r, "model", _with(r.model, hidden_dropout=0.3)), "hidden_dropout"),
    ],
)
def test_what_is_not_equal(
    tmp_path: Path,
    source: WithMoments,
    to: str,
    wrong: Callable[[Source, Source], None],
    problem: str,
) -> None:
    source.tensors["final_norm.bias"].zero_()
    result = written(source, tmp_path / "out", to)
    check_equal(source, result, WriteOptions())
    wrong(source, result)
    free = {"megads": "float16", "hf": "exp_avg_sq|hidden_dropout"}[to]
    if any(word in problem for word in free.split("|")):
        check_equal(source, result, WriteOptions())
        return
    with pytest.raises(CheckpointError, match=problem):
        check_equal(source, result, WriteOptions())


def _with(model: ModelConfig, **fields: object) -> ModelConfig:
    return ModelConfig.model_validate(model.model_dump() | fields)


def test_a_type_that_was_not_asked_for(tmp_path: Path, source: WithMoments) -> None:
    result = written(source, tmp_path / "out", "megads", WriteOptions(torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"bfloat16 instead of torch\.float32"):
        check_equal(source, result, WriteOptions())


@pytest.mark.parametrize("to", ["megads", "hf"])
def test_numbers_that_a_type_does_not_have_are_refused(
    tmp_path: Path, source: WithMoments, to: str
) -> None:
    source.tensors["blocks.1.mlp.up.weight"][3, 2] = -70000.0
    with pytest.raises(CheckpointError, match=r"mlp\.up\.weight holds -70000 in float32"):
        written(source, tmp_path / "out", to, WriteOptions(torch.float16))
    assert list(tmp_path.iterdir()) == []
    written(source, tmp_path / "out", to, WriteOptions(torch.bfloat16))


def test_infinite_and_undefined_numbers_stay_what_they_are() -> None:
    odd = torch.tensor([float("inf"), float("nan"), -float("inf"), 65504.0])
    assert retype(odd, torch.float16, "x").isfinite().tolist() == [False, False, False, True]
    assert retype(odd.half(), torch.float32, "x").dtype == torch.float32
    assert retype(torch.empty(0), torch.float16, "x").numel() == 0
    with pytest.raises(CheckpointError, match=r"x holds 3\.4\d*e\+38"):
        retype(torch.tensor([1.0, 3.402e38]), torch.bfloat16, "x")


@pytest.mark.parametrize(
    "options, word",
    [
        (ReadOptions(qkv="thirds"), "--qkv"),
        (ReadOptions(vocab_size=3), "--vocab-size"),
        (ReadOptions(keep_padding=True), "--keep-padding"),
        (ReadOptions(step=0), "--step"),
    ],
)
def test_options_without_use_are_refused(
    tmp_path: Path, source: WithMoments, options: ReadOptions, word: str
) -> None:
    for to in ("hf", "megads"):
        written(source, tmp_path / to, to)
        if (to, word) == ("megads", "--step"):
            assert open_source(tmp_path / to, options=options).trained.step == 0
            continue
        with pytest.raises(CheckpointError, match=f"{to}, which ignores {word}"):
            open_source(tmp_path / to, options=options)


def test_damaged_files_are_named_by_their_own_format(tmp_path: Path, source: WithMoments) -> None:
    written(source, tmp_path / "hf", "hf")
    (tmp_path / "hf" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_source(tmp_path / "hf")
    written(source, tmp_path / "own", "megads")
    (tmp_path / "own" / "step-0" / "COMMIT").unlink()
    with pytest.raises(CheckpointError, match="COMMIT"):
        open_source(tmp_path / "own")
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of a known format"):
        open_source(tmp_path / "none")


@pytest.mark.parametrize("train", [5, "x", [], {"samples": "many"}, {"samples": -1}])
def test_a_manifest_with_a_senseless_state(
    tmp_path: Path, source: WithMoments, monkeypatch: pytest.MonkeyPatch, train: object
) -> None:
    monkeypatch.setattr(source, "training_state", lambda: {"train": train}, raising=False)
    with pytest.raises(CheckpointError, match=r"step-0.*train="):
        written(source, tmp_path / "out", "megads")


def test_tokens_are_known_where_the_length_of_samples_is(source: WithMoments) -> None:
    source.trained = Trained(3, 10, 16)
    assert source.training_state()["train"]["tokens"] == 160
    source.trained = Trained(3, 10)
    assert source.training_state()["train"]["tokens"] == 0


def test_all_is_on_the_disk_before_the_result_appears(
    tmp_path: Path, source: WithMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    source.extras = (extra,)
    synced: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            synced.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(run.Path, "rename", renamed)
    written(source, tmp_path / "out", "megads")
    end = synced.index("rename")
    assert "tokenizer.json" in synced[:end]
    assert synced[end - 2 : end] == ["step-0", synced[end - 1]]
    assert synced[end - 1].startswith(".out-") and synced[end + 1 :] == [tmp_path.name]


@pytest.mark.parametrize(
    "window, length, want",
    [
        (None, 1000, 64),
        (7, 1000, 71),
        (200, 1000, 264),
        (500, 1000, 512),
        (512, 1000, 64),
        (7, 32, 32),
    ],
)
def test_a_sliding_window_shows_in_the_logits(
    tmp_path: Path, window: int | None, length: int, want: int
) -> None:
    """A window that one side has otherwise is found; nothing is left beside the result."""
    model = model_of(LLAMA, attention_window=window, max_seq_length=length, name="mistral")
    assert agreement._positions(model) == want
    if (window, length) != (7, 1000):
        return
    source = InMemory(model, random_weights(model))
    result = written(source, tmp_path / "hf", "hf")
    assert str(2 * 71) in compare_logits(source, result)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    source.model = _with(model, attention_window=67)
    with pytest.raises(CheckpointError, match="logits differ"):
        compare_logits(source, result)
