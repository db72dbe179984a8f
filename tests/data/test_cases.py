"""Samples that Megatron-LM and Megatron-DeepSpeed drew, against ours at the same places.

Their order of documents differs from ours (they shuffle documents, then samples); given that order,
which they stored, the samples must be the same: how many, where each begins and ends, and every id.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.data.indexed import IndexedTokens, TokenWriter
from megads.data.source import TokenSource
from tests.cases import ROOT, case

FOLDERS = [
    "data/expected_blend",
    "data/expected_int32",
    "data/expected_one_epoch",
    "data/expected_reset_masks",
    "data/expected_text",
    "data/expected_three_epochs_separate_last",
    "data/expected_train_run",
    "data/expected_with_empty",
    "data_mds/expected_blend",
    "data_mds/expected_two_epochs",
]


@dataclass(frozen=True)
class Part:
    """A source with its documents in their order, and their order of its samples."""

    source: TokenSource
    shuffle: np.ndarray


def stored(folder: Path, *names: str) -> np.ndarray:
    found = next(path for name in names if (path := folder / f"{name}.npy").is_file())
    return np.load(found)


def reordered(folder: Path, split: str, number: int, prefix: Path, seq: int, out: Path) -> Part:
    file = IndexedTokens(prefix)
    order = stored(folder, f"{split}.{number}.document_index", f"{split}.{number}.doc_idx")
    with TokenWriter(out, file.dtype) as writer:
        for sequence in order:
            writer.add_document(file.sequence(int(sequence)))
    shuffle = stored(folder, f"{split}.{number}.shuffle_index", f"{split}.{number}.shuffle_idx")
    written = IndexedTokens(out)
    return Part(TokenSource(written, 0, written.num_tokens, seq), shuffle)


def samples(folder: Path, expected: dict[str, Any], split: str, out: Path) -> list[np.ndarray]:
    seq, facts = expected["sequence_length"], expected["splits"][split]
    names = expected.get("datasets") or expected["data_prefix"]
    prefixes = [ROOT / str(name).removeprefix("shared/") for name in names if "/" in name]
    parts = [
        reordered(folder, split, number, prefix, seq, out / f"{split}{number}")
        for number, prefix in enumerate(prefixes)
    ]
    for part, described in zip(parts, facts["parts"], strict=True):
        assert part.source.num_samples == described["len"] == len(part.shuffle)
    count = facts.get("hashed_samples", facts["len"])
    if len(parts) == 1:
        return [parts[0].source.read(int(sample)) for sample in parts[0].shuffle[:count]]
    chosen = stored(folder, f"{split}.dataset_index")[:count].tolist()
    inside = stored(folder, f"{split}.dataset_sample_index")[:count].tolist()
    return [
        parts[which].source.read(int(parts[which].shuffle[place]))
        for which, place in zip(chosen, inside, strict=True)
    ]


def digest(rows: list[np.ndarray], *, in_two: bool) -> str:
    """Of each sample's tokens and then its labels, or of its seq_length + 1 ids at once."""
    pieces = (piece for row in rows for piece in ((row[:-1], row[1:]) if in_two else (row,)))
    return hashlib.sha256(b"".join(piece.astype("<i8").tobytes() for piece in pieces)).hexdigest()


@pytest.mark.parametrize("name", FOLDERS)
def test_samples_are_cut_where_others_cut_them(name: str, tmp_path: Path) -> None:
    folder = case(name)
    expected = json.loads((folder / "expected.json").read_text())
    for split, facts in expected["splits"].items():
        if facts is None:
            continue
        rows = samples(folder, expected, split, tmp_path)
        if "first_samples" in facts:
            for row, first in zip(rows, facts["first_samples"], strict=False):
                assert (row[:-1].tolist(), row[1:].tolist()) == (first["tokens"], first["labels"])
            wanted = facts["sha256_all_samples_tokens_labels_int64"]
        else:
            first = facts["first_samples_text_seq_plus_1"]
            assert [row.tolist() for row in rows[: len(first)]] == first
            wanted = facts["sha256_text_int64"]
        in_two = "first_samples" in facts
        assert digest(rows, in_two=in_two) == wanted
        assert digest([row[::-1] for row in rows], in_two=in_two) != wanted


def test_other_window_arithmetic_would_be_seen(tmp_path: Path) -> None:
    """Samples that do not share a token, a frequent slip, agree in the first one only."""
    folder = case("data/expected_one_epoch")
    expected = json.loads((folder / "expected.json").read_text())
    prefix = case("data/synth_u16.idx").with_suffix("")
    part = reordered(folder, "train", 0, prefix, 64, tmp_path / "x")
    tokens = np.asarray(part.source.file.tokens)
    for number, first in enumerate(expected["splits"]["train"]["first_samples"]):
        sample = int(part.shuffle[number])
        apart = tokens[sample * 65 : sample * 65 + 65].tolist()
        assert (apart[:-1] == first["tokens"]) is (sample == 0)


@pytest.mark.parametrize(
    ("lengths", "seq", "expected"),
    [([3, 0, 5, 1, 12], 4, 5), ([9], 4, 2), ([5], 4, 1), ([4], 4, 0), ([2, 2, 2], 8, 0)],
)
def test_samples_of_short_and_exact_corpora(
    lengths: list[int], seq: int, expected: int, tmp_path: Path
) -> None:
    ids = iter(range(100))
    with TokenWriter(tmp_path / "x", "u2") as writer:
        for length in lengths:
            writer.add_document([next(ids) for _ in range(length)])
    file = IndexedTokens(tmp_path / "x")
    source = TokenSource(file, 0, file.num_tokens, seq)
    rows = [source.read(sample).tolist() for sample in range(source.num_samples)]
    assert rows == [list(range(k * seq, k * seq + seq + 1)) for k in range(expected)]
    labels = [label for row in rows for label in row[1:]]
    assert labels == list(range(1, 1 + expected * seq))  # each once, in order
    assert sum(lengths) - 1 - len(labels) < seq
