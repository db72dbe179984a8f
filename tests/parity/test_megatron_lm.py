"""Training as Megatron-LM trains: from its weights, on its samples, to its losses.

Megatron-LM's softmax covers the padded vocabulary, and its learning rate is that of the step
before; all else is what any configuration says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megads.config.compose import compose
from megads.convert.formats import open_source
from megads.convert.run import convert
from megads.convert.source import ReadOptions, WriteOptions
from megads.data.indexed import IndexedTokens
from tests.cases import case
from tests.distributed import Workers
from tests.training import column, run_training

SEQ, SAMPLES = 48, 32
FAMILIES = ["gpt", "llama"]
LAYOUTS = ["single", "tp2", "pp2", "tp2pp2", "dp2", "dp2zero1", "dp2zero2", "dp2zero3"]


def stored_samples() -> NDArray[np.int64]:
    """`[samples, seq + 1]` token ids, put together from Megatron-LM's own three indices."""
    folder = case("data/expected_train_run")
    documents, starts, order = (
        np.load(folder / f"train.0.{name}_index.npy") for name in ("document", "sample", "shuffle")
    )
    file = IndexedTokens(case("data/topics_a_text_document.bin").with_suffix(""))
    stream = np.concatenate([file.document(int(d)) for d in documents]).astype(np.int64)
    lengths = np.array([len(file.document(int(d))) for d in documents])
    begins = np.concatenate([[0], np.cumsum(lengths)])
    samples = []
    for number in order[:SAMPLES]:
        document, offset = starts[number]
        first = begins[document] + offset
        samples.append(stream[first : first + SEQ + 1])
    wanted = json.loads((folder / "expected.json").read_text())["splits"]["train"]
    for mine, theirs in zip(samples, wanted["first_samples"], strict=False):
        assert mine.tolist() == [*theirs["tokens"], theirs["labels"][-1]]
    return np.stack(samples)


def as_megatron_does(
    rank: int, samples: NDArray[np.int64], rates: list[float]
) -> Callable[[], None]:
    """Samples in the given order, and the given learning rates."""
    from megads.data.loader import TokenLoader
    from megads.train.build import RunParts

    tokens, rate = TokenLoader._tokens, RunParts.learning_rate
    TokenLoader._tokens = lambda self, positions: samples[positions]  # type: ignore
    RunParts.learning_rate = lambda self, batch: rates[self.state.step]  # type: ignore

    def undo() -> None:
        TokenLoader._tokens = tokens  # type: ignore[method-assign]
        RunParts.learning_rate = rate  # type: ignore[method-assign]

    return undo


@pytest.fixture(scope="module", params=FAMILIES)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(checkpoint of megads, what Megatron-LM logged)."""
    expected = json.loads(
        (case(f"megatron_lm/{request.param}_tp1pp1") / "expected.json").read_text()
    )
    source = open_source(
        case(f"megatron_lm/start_{request.param}"), options=ReadOptions(keep_padding=True)
    )
    target = tmp_path_factory.mktemp("start") / request.param
    convert(source, target, "megads", WriteOptions(optimizer=False), lambda kind, name: None)
    return target, source.model, expected


def trained(
    workers: Workers, run_dir: Path, start: Any, layout: str, *overrides: str
) -> list[dict[str, Any]]:
    checkpoint, model, expected = start
    fields = {f: v for f, v in model.model_dump().items() if v is not None}
    words = [f"model.{field}={json.dumps(value)}" for field, value in fields.items()]
    words += [
        f"run.dir={run_dir}",
        f"parallel={layout}",
        f"checkpoint.load={checkpoint}",
        "checkpoint.load_what=weights",
        "checkpoint.save_last=false",
        f"data.paths=[{case('data/topics_a_text_document.bin').with_suffix('')}]",
        "train.steps=4",
        "logging.every=1",
        "eval.every=0",
        f"train.seq_length={SEQ}",
        "train.micro_batch_size=2",
        "train.global_batch_size=8",
        "optim.betas=[0.9,0.95]",
        "optim.weight_decay=0.1",
        "optim.clip=1.0",
    ]
    rates = list(expected["learning_rate_used_by_iteration"].values())
    last = {word.split("=", 1)[0]: word for word in [*words, *overrides]}
    config = compose(list(last.values()))
    return run_training(workers, config, as_megatron_does, stored_samples(), rates)


def logged(start: Any, name: str) -> torch.Tensor:
    return torch.tensor(list(start[2][name].values()), dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_megatron_lm(
    tmp_path: Path, workers: Workers, start: Any, layout: str
) -> None:
    lines = trained(workers, tmp_path, start, layout)
    losses, norms = logged(start, "lm_loss_by_iteration"), logged(start, "grad_norm_by_iteration")
    torch.testing.assert_close(column(lines, "loss"), losses, rtol=0, atol=1e-5)
    torch.testing.assert_close(column(lines, "grad_norm"), norms, rtol=0, atol=1e-3)


@pytest.mark.parametrize("wrong", ["optim.weight_decay=0.2", "optim.betas=[0.9,0.99]"])
def test_another_setting_gives_other_losses(
    tmp_path: Path, workers: Workers, start: Any, wrong: str
) -> None:
    """Negative control."""
    lines = trained(workers, tmp_path, start, "single", wrong)
    difference = (column(lines, "loss") - logged(start, "lm_loss_by_iteration")).abs().max()
    assert difference > 1e-5
