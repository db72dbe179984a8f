from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megads.checkpoint.store import CheckpointStore
from megads.cli.generate import main
from megads.config.model import ModelConfig
from megads.models.families import param_specs
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece

CONFIG = ModelConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=300, max_seq_length=8
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    pieces = []
    for spec in param_specs(CONFIG):
        origin = (0,) * len(spec.shape)
        data = torch.randn(spec.shape)
        pieces.append(
            TensorPiece(f"param/{spec.name}", data.dtype, spec.shape, origin, spec.shape, data)
        )
    store = CheckpointStore(tmp_path / "checkpoints", Axis("world"))
    store.save(2, pieces, state={}, meta={"model": CONFIG, "layout": {}})
    (tmp_path / "config.yaml").write_text("data:\n  tokenizer: byte\n")
    return tmp_path


def test_prints_the_prompt_and_its_continuation(run, capsys):
    """Longer than the table of positions, so the context must be cropped."""
    arguments = [
        str(run),
        "--prompt",
        "Hello",
        "--max-tokens",
        "12",
        "--temperature",
        "9",
        "--seed",
        "4",
    ]
    outputs = []
    for _ in range(2):
        assert main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("Hello") and len(outputs[0]) > len("Hello\n")
    assert main([*arguments[:-1], "5"]) == 0
    assert capsys.readouterr().out != outputs[0]


def test_greedy_needs_no_seed_and_no_prompt(run, capsys):
    outputs = []
    for _ in range(2):
        assert main([str(run), "--temperature", "0", "--max-tokens", "5"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 1, "no checkpoint at"),
        (["", "--top-p", "2"], 2, "top-p=2.0"),
        (["", "--tokenizer", "missing.json"], 2, "missing.json"),
    ],
)
def test_mistakes_end_with_one_message(run, capsys, arguments, status, message):
    assert main([str(run / arguments[0]), *arguments[1:]]) == status
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1
    assert captured.out == ""
