"""Document masking: packed documents are as if each were alone, whatever the layout.

Held against the dense oracle run on one document at a time, against Megatron-LM's stored masks, and
between layouts. Where documents end is known by position; no token id means anything here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megads.config.model import ModelConfig
from megads.data.documents import document_starts, loss_weights
from megads.data.indexed import IndexedTokens, TokenWriter
from megads.data.loader import TokenLoader, open_loader
from megads.data.prepare import prepare_data
from megads.data.source import TokenSource
from megads.models.families import param_specs
from megads.models.gpt import GPTStage
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Mesh
from tests import training
from tests.cases import case
from tests.distributed import Workers
from tests.kernels.test_documents import starts_of
from tests.models.stages import (
    assert_gradients_close,
    make_stage,
    random_batch,
    random_weights,
    with_dropout,
)
from tests.models.test_gpt import SEQ, VARIANTS, config_of
from tests.models.test_saved import KEEPING
from tests.parity import dense
from tests.training import assert_same_curve, run_training, tiny_config, write_tokens

ROWS = ([5, 1, 6], [12], [2, 3, 4, 3])
EOS = 9


def packed(config: ModelConfig, rows: Sequence[Sequence[int]] = ROWS) -> MicroBatch:
    """Random documents of these lengths, as the loader gives them."""
    batch = random_batch(config, batch=len(rows), seq=SEQ)
    starts = starts_of(rows)
    following = F.pad(starts[:, 1:], (0, 1), value=-1)  # the last token's label is of another
    batch.loss_mask, batch.document_starts = (starts == following).float(), starts
    return batch


def documents_of(rows: Sequence[Sequence[int]]) -> list[tuple[int, slice]]:
    """Row and positions of every document."""
    ends = [np.cumsum(lengths).tolist() for lengths in rows]
    return [
        (row, slice(end - length, end))
        for row, lengths in enumerate(rows)
        for end, length in zip(ends[row], lengths, strict=True)
    ]


def one_by_one(
    config: ModelConfig, weights: dict[str, Tensor], batch: MicroBatch
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each document alone, and gradients of the sum of their losses.

    By the dense oracle, or where it has no window by the reference kernels.
    """
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    stage = make_stage(config, weights, Mesh.single(), kernels="reference")
    every, loss = [], torch.zeros(())
    for row, where in documents_of(ROWS):
        ids = batch.tokens[row : row + 1, where]
        if config.attention_window is None:
            logits = dense.logits(leaves, config, ids)[0]
            loss = loss + F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        else:
            logits = stage.logits(None, MicroBatch(ids, ids))[0]
            targets = F.pad(ids[:, 1:], (0, 1))
            counts = torch.ones(1, ids.shape[1])
            counts[:, -1] = 0
            loss = loss + stage(None, MicroBatch(ids, targets, counts))
        every.append(logits.detach())
    loss.backward()
    if config.attention_window is None:
        return every, {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]
    return every, gradients(stage, config)


def gradients(stage: GPTStage, config: ModelConfig) -> dict[str, Tensor]:
    """By name, without the rows that pad the vocabulary."""
    result = {}
    for spec in param_specs(config):
        grad = stage.get_parameter(spec.name).grad
        assert grad is not None
        result[spec.name] = grad[: spec.shape[0]]
    return result


def largest_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    scale = max(w.abs().max() for w in want)
    return float(max((g - w).abs().max() for g, w in zip(got, want, strict=True)) / scale)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in VARIANTS} | {
    "windowed": ("llama", {"attention_window": 3}),
    "windowed alibi": ("bloom", {"attention_window": 3}),
}


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_are_as_if_alone(model: str, kernels: str) -> None:
    variant, changes = MODELS[model]
    config = config_of(variant, num_layers=3, **changes)
    weights, batch = random_weights(config), packed(config)
    logits, grads = one_by_one(config, weights, batch)

    def outcome(batch: MicroBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
        stage = make_stage(config, weights, Mesh.single(), kernels=kernels)
        with torch.no_grad():
            all_logits = stage.logits(None, batch)
        stage(None, batch).backward()
        mine = gradients(stage, config)
        return [all_logits[place] for place in documents_of(ROWS)], mine

    got, mine = outcome(batch)
    assert largest_error(got, logits) < 2e-5
    assert_gradients_close(mine, grads, 5e-5)

    # Negative controls: one boundary off by one token, and none at all.
    assert batch.document_starts is not None
    batch.document_starts = starts_of([[5, 2, 5], *ROWS[1:]])
    spoiled, mine = outcome(batch)
    assert largest_error(spoiled, logits) > 1e-3
    with pytest.raises(AssertionError):
        assert_gradients_close(mine, grads, 1e-3)
    batch.document_starts = None
    assert largest_error(outcome(batch)[0], logits) > 1e-3


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_a_document_does_not_see_another(model: str, kernels: str) -> None:
    """To the bit; and without the mask it does."""
    variant, changes = MODELS[model]
    config = config_of(variant, num_layers=2, **changes)
    stage = make_stage(config, random_weights(config), Mesh.single(), kernels=kernels)
    batch = packed(config, [[5, 7]])
    other = packed(config, [[5, 7]])
    other.tokens[:, :5] = (other.tokens[:, :5] + 1) % config.vocab_size
    with torch.no_grad():
        a, b = stage.logits(None, batch), stage.logits(None, other)
        assert not torch.equal(a[:, :5], b[:, :5])
        assert torch.equal(a[:, 5:], b[:, 5:])
        batch.document_starts = other.document_starts = None
        a, b = stage.logits(None, batch), stage.logits(None, other)
        assert not torch.equal(a[:, 5:7], b[:, 5:7])


@pytest.mark.parametrize("keeping", ["selective", "full", "everything on the host"])
def test_what_is_kept_changes_no_bit(keeping: str) -> None:
    results = []
    for dropout in (0.0, 0.5):
        config = config_of("gpt", num_layers=2, hidden_dropout=dropout, attention_dropout=dropout)
        for how in ("everything", keeping):
            batches = [packed(config), packed(config, [[4, 8], [12], [1, 11]])]
            batches[1].index = 1
            results.append(
                with_dropout(0, 1, config, random_weights(config), batches, KEEPING[how])
            )
    for plain, again in (results[:2], results[2:]):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], again[0], strict=True))
        assert all(torch.equal(grad, again[1][name]) for name, grad in plain[1].items())
    assert not torch.equal(results[0][0][0], results[2][0][0])


# Where documents begin, from files.


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=9),
    first=st.integers(0, 12),
    count=st.integers(1, 12),
)
def test_starts_are_those_of_a_list_of_documents(
    documents: list[list[int]],
    first: int,
    count: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Documents of several sequences, some of them empty, as are some documents."""
    prefix = tmp_path_factory.mktemp("starts") / "x"
    owner: list[int] = []
    with TokenWriter(prefix, "u2") as writer:
        for number, sequences in enumerate(documents):
            for length in sequences:
                writer.add_sequence([0] * length)
            writer.end_document()
            owner += [number] * sum(sequences)
    if first + count > len(owner):
        return
    here = owner[first : first + count]
    got = document_starts(IndexedTokens(prefix), first, count)
    assert got.tolist() == [here.index(document) for document in here]
    same = [float(a == b) for a, b in itertools.pairwise(here)]
    assert loss_weights(got).tolist() == same


def write_documents(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    with TokenWriter(prefix, "u2") as writer:
        for tokens in documents:
            writer.add_document(np.asarray(tokens))
    return str(prefix)


def only_batch(prefix: str, seq: int, vocab_size: int, **options: Any) -> MicroBatch:
    """The sample of a file that has just one."""
    source = TokenSource.open(prefix, seq, split="train", valid_fraction=0.0)
    loader = TokenLoader([source], seed=1, vocab_size=vocab_size, document_mask=True, **options)
    (batch,) = loader.batches(0, 1, 1, 1, 0)
    loader.close()
    return batch


def test_an_end_token_means_nothing_by_itself(tmp_path: Path) -> None:
    """Two texts that end in EOS and a third of nothing but EOS, as padding with it would be: its
    loss is kept where EOS is a text's own, and dropped where a label is the next text's first."""
    texts = [[5, 6, EOS], [7, 8, EOS], [EOS] * 5]
    batch = only_batch(write_documents(tmp_path / "x", texts), 10, 10)
    assert batch.document_starts is not None and batch.loss_mask is not None
    positions = torch.arange(10) - batch.document_starts
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [[6, EOS, 7, 8, EOS, EOS, EOS, EOS, EOS, EOS]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 1, 1, 1, 1]]

    # EOS in the middle of a text ends nothing, and a text needs none to end.
    texts = [[5, EOS, 6, 7], [8, 5, 6, 7, 8, 5, 6]]
    batch = only_batch(write_documents(tmp_path / "y", texts), 10, 10)
    assert batch.document_starts is not None and batch.loss_mask is not None
    assert batch.document_starts.tolist() == [[0] * 4 + [4] * 6]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 0, 1, 1, 1, 1, 1, 1]]


def test_evaluation_fills_up_by_place_not_by_id(tmp_path: Path) -> None:
    """Three samples of EOS alone, four rows: the labels that count are those inside of texts."""
    prefix = write_documents(tmp_path / "x", [[EOS] * 7, [EOS] * 9])
    source = TokenSource.open(prefix, 5, split="train", valid_fraction=0.0)
    loader = TokenLoader([source], seed=1, vocab_size=10, document_mask=True)
    plan = loader.evaluation_plan(steps=5, global_batch_size=4)
    (batch,) = loader.evaluation_batches(plan, 0, micro_batch_size=4, dp_size=1, dp_index=0)
    loader.close()
    assert batch.loss_mask is not None
    # The sample with the boundary, tokens 5 to 10, has no label for token 7.
    assert sorted(batch.loss_mask.sum(1).tolist()) == [0, 4, 5, 5]
    assert [1, 0, 1, 1, 1] in batch.loss_mask.tolist()


def megatron_masks(tokens: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and loss mask by its rule: a document ends with every eod token."""
    ends = tokens == eod
    latest = np.maximum.accumulate(np.where(ends, np.arange(len(tokens)) + 1, 0))
    begin = np.concatenate([[0], latest[:-1]])
    return np.arange(len(tokens)) - begin, 1.0 - ends


def test_masks_are_those_of_megatron_lm(tmp_path: Path) -> None:
    """Its samples are cut from the documents in its shuffled order; here they are written so."""
    folder = case("data/expected_reset_masks")
    expected = json.loads((folder / "expected.json").read_text())
    order, shuffle = (
        np.load(folder / f"train.0.{name}_index.npy") for name in ("document", "shuffle")
    )
    file = IndexedTokens(case("data/synth_u16.bin"))
    prefix = write_documents(tmp_path / "x", [file.document(int(d)) for d in order])
    source = TokenSource.open(prefix, 96, split="train", valid_fraction=0.0)
    at = np.arange(96)
    samples = expected["splits"]["train"]["first_samples"]
    for number, want in enumerate(samples):
        sample = int(shuffle[number])
        tokens, starts = source.read(sample), source.document_starts(sample)
        assert tokens[:-1].tolist() == want["tokens"] and tokens[1:].tolist() == want["labels"]
        assert starts[:-1].tolist() == want["attention_first_key_of_query"]
        if "position_ids" in want:
            assert (at - starts[:-1]).tolist() == want["position_ids"]
            assert loss_weights(starts).tolist() == want["loss_mask"]
            assert 0 in want["loss_mask"]
    # All samples by its rule, which the stored ones confirm: every document here ends with eod.
    seams = 0
    for sample in range(source.num_samples):
        tokens, starts = source.read(sample), source.document_starts(sample)
        positions, mask = megatron_masks(tokens[:-1], expected["eod"])
        assert np.array_equal(at - starts[:-1], positions)
        assert np.array_equal(loss_weights(starts), mask)
        seams += int((mask == 0).sum())
    lengths = np.asarray(file.sizes)[order]
    assert seams == (np.cumsum(lengths) <= 96 * source.num_samples).sum() == 36


# Whole runs.

STEPS = 4
LAYOUTS: dict[str, list[str]] = {
    "tp2": ["parallel=tp2"],
    "tp2 sp": ["parallel=tp2", "parallel.sequence_parallel=true"],
    "pp2": ["parallel=pp2", "train.micro_batch_size=1"],
    "pp2 gpipe": ["parallel=pp2", "parallel.schedule=gpipe", "train.recompute=full"],
    "pp2vpp2": ["parallel=pp2vpp2", "train.micro_batch_size=2"],
    "dp2zero3": ["parallel=dp2zero3", "train.recompute=selective"],
}
PAIRS = [("gpt", x) for x in LAYOUTS]
PAIRS += [(f, x) for f in ("llama", "bloom") for x in ("tp2 sp", "pp2")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens", documents=400)


def run(
    workers: Workers, directory: Path, data: str, family: str, *overrides: str
) -> list[dict[str, Any]]:
    options = ["data.document_mask=true", f"train.steps={STEPS}", *overrides]
    return run_training(workers, tiny_config(directory, data, family, *options))


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory, data: str, workers: Workers
) -> dict[str, list[dict[str, Any]]]:
    families = sorted({family for family, _ in PAIRS})
    return {f: run(workers, tmp_path_factory.mktemp(f), data, f) for f in families}


@pytest.mark.parametrize("family,layout", PAIRS)
def test_same_curve_in_every_layout(
    tmp_path: Path, data: str, workers: Workers, single: dict[str, Any], family: str, layout: str
) -> None:
    got = run(workers, tmp_path, data, family, *LAYOUTS[layout])
    assert len(got) == STEPS
    assert_same_curve(got, single[family])


@pytest.mark.parametrize("family", ["gpt", "llama", "bloom"])
def test_loss_of_a_run_is_that_of_its_documents(
    tmp_path: Path, data: str, workers: Workers, single: dict[str, Any], family: str
) -> None:
    """The first step's: the mean over the labels inside of documents, each run alone."""
    config = tiny_config(tmp_path / "run", data, family)
    (pieces,) = workers(1).run(training.gathered_weights, config, ["param"])
    weights = {
        key.removeprefix("param/"): tensor for key, tensor in training.assemble([pieces]).items()
    }
    loader = open_loader(config, prepare_data(config), "train")
    ids = loader.sample_ids(0, 8)
    loader.close()
    file = IndexedTokens(data)
    stream = torch.from_numpy(file.tokens.astype("int64"))
    owner = torch.arange(file.num_documents).repeat_interleave(torch.tensor(file.sizes))
    loss, count, seams = 0.0, 0, 0
    for sample in ids:
        tokens, owners = (x[16 * sample : 16 * sample + 17] for x in (stream, owner))
        for document in owners.unique():
            mine = tokens[owners == document][None]
            seams += 1
            if mine.shape[1] > 1:
                logits = dense.logits(weights, config.model, mine[:, :-1])[0]
                loss += F.cross_entropy(logits, mine[0, 1:], reduction="sum").item()
                count += mine.shape[1] - 1
    assert seams > len(ids), "no sample here holds an end of a document"
    got = single[family][0]["loss"]
    assert got == pytest.approx(loss / count, rel=1e-5)
    # Negative control: read as one text, the loss is another.
    plain = run_training(workers, tiny_config(tmp_path / "plain", data, family, "train.steps=1"))
    assert abs(plain[0]["loss"] - got) > 1e-4 * got
