from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data.indexed import TokenWriter
from megads.data.loader import TokenLoader, TokenSource
from megads.errors import DataError
from megads.parallel.batch import MicroBatch

SEQ, VOCAB = 5, 101


def write(prefix: Path, lengths: list[int], *, first: int = 0, dtype: str = "u2") -> np.ndarray:
    """A file whose token at stream position p is (first + p) mod VOCAB."""
    stream = (np.arange(sum(lengths)) + first) % VOCAB
    with TokenWriter(prefix, dtype) as writer:
        for part in np.split(stream, np.cumsum(lengths)[:-1]):
            writer.add_document(part)
    return stream


def loader(
    prefix: Path, split: str = "train", fraction: float = 0.0, seed: int = 3, **options: object
) -> TokenLoader:
    source = TokenSource.open(str(prefix), SEQ, split=split, valid_fraction=fraction)  # type: ignore[arg-type]
    return TokenLoader([source], seed=seed, vocab_size=VOCAB, **options)  # type: ignore[arg-type]


def rows(batches: list[MicroBatch]) -> list[list[int]]:
    """Each sample as its seq_length + 1 tokens."""
    result = []
    for batch in batches:
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.labels.is_contiguous()
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        both = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
        result += both.tolist()
    return result


def test_samples_are_cut_from_the_stream(tmp_path: Path) -> None:
    stream = write(tmp_path / "x", [3, 0, 9, 1, 24])  # 37 tokens: 7 samples and a tail of one
    data = loader(tmp_path / "x")
    assert data.num_samples == 7
    ids = data.sample_ids(0, 7)
    assert sorted(ids) == list(range(7))
    read = rows(data.batches(0, 7, 7, 1, 0))
    assert read == [stream[SEQ * i : SEQ * i + SEQ + 1].tolist() for i in ids]
    labels = sorted(p for i in ids for p in range(SEQ * i + 1, SEQ * i + SEQ + 1))
    assert labels == list(range(1, 36))


def test_a_short_split_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "x", [5])
    with pytest.raises(DataError, match=r"x\.bin: 5 tokens in this split.*= 6"):
        loader(tmp_path / "x")


def test_training_and_validation_share_no_token(tmp_path: Path) -> None:
    write(tmp_path / "x", [40, 10, 30, 17])
    sources = [
        TokenSource.open(str(tmp_path / "x"), SEQ, split=split, valid_fraction=0.2)
        for split in ("train", "valid")
    ]
    assert (sources[0].start, sources[1].stop) == (0, 97)
    assert sources[0].stop == sources[1].start == 80  # a document boundary, 2 from 77.6


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2])), max_size=8)
)
def test_the_global_stream_is_the_same_for_any_layout(
    steps: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A fresh loader with another dp and micro batch at each step, as after a resume."""
    prefix = tmp_path_factory.mktemp("layout") / "x"
    write(prefix, [40, 63, 28])
    whole = loader(prefix)
    consumed = 0
    for dp, micro in steps:
        reference = whole.batches(consumed, 24, 1, 1, 0)
        resumed = [loader(prefix).batches(consumed, 24, micro, dp, rank) for rank in range(dp)]
        assert rows([b for rank in resumed for b in rank]) == rows(reference)
        assert [b.index for rank in resumed for b in rank] == list(range(24 // micro))
        consumed += 24
    ids = whole.sample_ids(0, 4 * 26)
    assert Counter(ids) == dict.fromkeys(range(26), 4)
    assert loader(prefix, seed=4).sample_ids(0, 26) != ids[:26]  # negative control


def test_reading_ahead_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "x", [200])
    ahead = loader(tmp_path / "x")
    sizes = [4, 4, 8, 8, 8, 2]  # a ramp, then a jump back: the guess is right, wrong, right, ...
    consumed = [0, 4, 8, 16, 24, 0]
    got = [rows(ahead.batches(c, s, 2, 1, 0)) for c, s in zip(consumed, sizes, strict=True)]
    fresh = [
        rows(loader(tmp_path / "x").batches(c, s, 2, 1, 0))
        for c, s in zip(consumed, sizes, strict=True)
    ]
    assert got == fresh
    ahead.close()


@pytest.mark.parametrize("bad", [VOCAB, 60_000, -1])
def test_an_id_outside_the_vocabulary_is_named(bad: int, tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x", "i4") as writer:
        writer.add_document([1, 2, 3, VOCAB - 1, bad, 0])
    with pytest.raises(DataError, match=rf"x\.bin: token id {bad} .*vocab_size={VOCAB}"):
        loader(tmp_path / "x").batches(0, 1, 1, 1, 0)


def test_a_bad_id_in_a_batch_read_ahead_ends_the_step_that_needs_it(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([*range(11)])
        writer.add_document([VOCAB] * 10)
    data = loader(tmp_path / "x")
    good = [i < 2 for i in data.sample_ids(0, 4)]
    for consumed, fine in enumerate(good):
        if fine:
            data.batches(consumed, 1, 1, 1, 0)
        else:
            with pytest.raises(DataError, match=f"token id {VOCAB}"):
                data.batches(consumed, 1, 1, 1, 0)


def test_evaluation_counts_each_sample_once_and_pads_with_zero_weight(tmp_path: Path) -> None:
    write(tmp_path / "x", [56])  # 11 samples
    data = loader(tmp_path / "x")
    plan = data.evaluation_plan(steps=10, global_batch_size=4)
    assert (plan.samples, plan.num_batches) == (11, 3)
    counted: list[list[int]] = []
    for number in range(plan.num_batches):
        lengths = set()
        for rank in range(2):
            batches = data.evaluation_batches(
                plan, number, global_batch_size=4, micro_batch_size=1, dp_size=2, dp_index=rank
            )
            lengths.add(len(batches))
            for batch in batches:
                row = rows([batch])[0]
                if batch.loss_mask is None:
                    counted.append(row)
                else:
                    assert batch.loss_mask.dtype == torch.float32
                    assert batch.loss_mask.shape == batch.tokens.shape
                    assert batch.loss_mask.sum() == 0
        assert lengths == {2}
    assert sorted(r[0] for r in counted) == [SEQ * i for i in range(11)]
    with pytest.raises(ValueError, match="batch 3"):
        data.evaluation_batches(
            plan, 3, global_batch_size=4, micro_batch_size=1, dp_size=2, dp_index=0
        )


def test_evaluation_masks_only_the_rows_beyond_the_plan(tmp_path: Path) -> None:
    write(tmp_path / "x", [56])
    data = loader(tmp_path / "x")
    plan = data.evaluation_plan(steps=10, global_batch_size=4)
    [batch] = data.evaluation_batches(
        plan, 2, global_batch_size=4, micro_batch_size=4, dp_size=1, dp_index=0
    )
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum(dim=1).tolist() == [SEQ, SEQ, SEQ, 0]


def test_several_sources(tmp_path: Path) -> None:
    """Without weights each sample of all once per epoch; with weights a blend."""
    sources = []
    for name, length, dtype in (("a", 21, "u2"), ("b", 51, "i4"), ("c", 6, "u2")):
        write(tmp_path / name, [length], first=7 * len(sources), dtype=dtype)
        sources.append(TokenSource.open(str(tmp_path / name), SEQ, split="train", valid_fraction=0))
    together = TokenLoader(sources, seed=1, vocab_size=VOCAB)
    assert sorted(together.sample_ids(15, 15)) == list(range(15))
    assert [s.num_samples for s in sources] == [4, 10, 1]
    expected = {
        i: s.read(k).tolist()
        for i, (s, k) in enumerate((s, k) for s in sources for k in range(s.num_samples))
    }
    blend = TokenLoader(sources, seed=1, vocab_size=VOCAB, weights=[0.5, 0.25, 0.25])
    for data in (together, blend):
        ids = data.sample_ids(0, 40)
        assert rows(data.batches(0, 40, 4, 1, 0)) == [expected[i] for i in ids]
    assert np.bincount(np.searchsorted([4, 14], ids, side="right")).tolist() == [20, 10, 10]
