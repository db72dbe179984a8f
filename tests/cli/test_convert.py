"""`megads-convert` as a user calls it."""

from __future__ import annotations

import errno
import io
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.cli.convert import main
from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.run import convert
from megads.convert.source import ReadOptions, Trained, WriteOptions
from megads.models.families import param_specs
from tests.convert.hf_models import InMemory
from tests.models.stages import random_weights

MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=8000, max_seq_length=16
)
NAMES = [spec.name for spec in param_specs(MODEL)]


class Trained3(InMemory):
    kinds = ("param", "exp_avg", "exp_avg_sq")
    trained = Trained(3, 24, 16)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights(MODEL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    """A run with a checkpoint of megads, moments and a tokenizer."""
    path = tmp_path_factory.mktemp("runs") / "run"
    convert(Trained3(MODEL, weights), path, "megads", WriteOptions(), lambda kind, name: None)
    (path / "tokenizer.json").write_text("{}")
    return path


def command(*words: object) -> int:
    return main([str(word) for word in words])


def test_to_hugging_face_and_back_with_checks(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(run, tmp_path / "hf", "--to", "hf", "--check") == 0
    told = capsys.readouterr().out
    assert f"checked: {len(NAMES)} tensors" in told and "those of transformers within" in told
    assert "blocks.*.attn.qkv.weight" in told and "blocks.1." not in told
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    assert command(tmp_path / "hf", tmp_path / "own", "--to", "megads", "--check", "--table") == 0
    told = capsys.readouterr().out
    assert all(name in told for name in NAMES) and "blocks.*" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "own"]
    assert command("verify", tmp_path / "own") == 0
    assert f"step 0, {len(NAMES)} tensors" in capsys.readouterr().out


def test_a_check_that_fails_is_the_exit_status(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megads.convert.hf.writer.retype", lambda tensor, *_: -tensor)
    assert command(run, tmp_path / "hf", "--to", "hf", "--check") == 1
    assert "param of embedding.word.weight is not the source's" in capsys.readouterr().err


def test_verify_names_damage(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, tmp_path / "own", "--to", "megads") == 0
    assert command("verify", tmp_path / "own") == 0
    assert "step 3" in capsys.readouterr().out
    path = max((tmp_path / "own" / "step-3").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert command("verify", tmp_path / "own") == 1
    assert path.name in capsys.readouterr().err


def test_megads_to_megads(tmp_path: Path, run: Path, weights: dict[str, torch.Tensor]) -> None:
    words = ["--to", "megads", "--max-file-mb", "1", "--dtype", "bf16", "--drop-optimizer"]
    assert command(run, tmp_path / "own", *words, "--check") == 0
    files = list((tmp_path / "own" / "step-3").glob("*.safetensors"))
    size = sum(2 * tensor.numel() for tensor in weights.values())
    assert len(files) > 1 and max(path.stat().st_size for path in files) <= 1 << 20
    assert size <= sum(path.stat().st_size for path in files) < size + (1 << 16)
    result = open_source(tmp_path / "own")
    result.check_complete()
    assert result.kinds == ("param",) and result.trained.samples == 24
    assert result.training_state()["train"]["tokens"] == 24 * 16
    for name, tensor in weights.items():
        assert torch.equal(result.tensor("param", name), tensor.bfloat16()), name
    assert command(run, tmp_path / "whole", "--to", "megads", "--step", 3, "--check") == 0
    assert open_source(tmp_path / "whole", options=ReadOptions(step=3)).kinds == Trained3.kinds


def test_an_existing_target_is_left_alone(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert command(run, tmp_path / "mine", "--to", "hf") == 1
    assert "exists; choose a new directory" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


class _Full(io.FileIO):
    """A file on a disk that has 100 kB left."""

    def write(self, data: Any) -> int:
        if self.tell() > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:60_000])


def test_what_a_killed_conversion_left_is_told(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".new-0123abcd", ".new-0123", ".newer-0123abcd"):
        (tmp_path / name).mkdir()
    assert command(run, tmp_path / "new", "--to", "megads") == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "was killed" in line)
    assert note.startswith(f"note: {tmp_path}/.new-0123abcd is of a conversion")
    assert len(list(tmp_path.glob(".new*"))) == 3


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        if path.suffix == ".safetensors" and "x" in mode:
            return _Full(path, "xb")
        return opened(path, mode, *args, **named)

    monkeypatch.setattr(Path, "open", full)
    assert command(run, tmp_path / "hf", "--to", "hf") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may become larger than 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("to", ["megads", "megatron-lm", "hf"])
def test_a_file_that_cannot_grow_leaves_nothing(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    assert command(run, tmp_path / "out", "--to", to) == 1
    assert "File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--to", "hf", "--tp", "2"], "--tp"),
        (["--to", "megatron-lm", "--max-file-mb", "3"], "--max-file-mb"),
        (["--to", "megads", "--keep-padding", "--vocab-size", "3"], "--keep-padding"),
        (["--to", "gpt-neox"], "gpt-neox"),
        (["--to", "hf", "--max-file-mb", "0"], "is not 1 or more"),
        ([], "--to"),
    ],
)
def test_words_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path, tmp_path / "out", *words)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--qkv", "thirds"], "ignores --qkv"),
        (["--vocab-size", "5"], "ignores --vocab-size"),
        (["--keep-padding"], "ignores --keep-padding"),
        (["--step", "4"], "step-4"),
    ],
)
def test_options_that_the_source_ignores(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert command(run, tmp_path / "out", "--to", "hf", *words) == 1
    assert problem in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["--to", "hf"], False),
        (["--to", "megatron-lm"], False),
        (["--to", "megads"], True),
        (["--to", "megads", "--drop-optimizer"], False),
    ],
)
def test_moments_are_only_asked_for_where_they_go(words: list[str], wanted: bool) -> None:
    from megads.cli.convert_arguments import parse

    assert parse(["a", "b", *words]).reading.optimizer is wanted


def test_the_installed_command(tmp_path: Path, run: Path) -> None:
    script = Path(sys.executable).with_name("megads-convert")
    if not script.exists():
        pytest.skip(f"needs {script}, which installing the package makes")
    words = [run, tmp_path / "hf", "--to", "hf"]
    done = subprocess.run([script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf" / "model.safetensors").exists() and "embedding.word" in done.stdout
