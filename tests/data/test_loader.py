from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data.indexed import TokenWriter
from megads.data.loader import TokenLoader
from megads.data.microbatches import Rows
from megads.data.plan import Mixture
from megads.data.source import TokenSource, numbered
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


@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2])), max_size=4)
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
        fresh = [loader(prefix) for _ in range(dp)]
        resumed = [fresh[rank].batches(consumed, 24, micro, dp, rank) for rank in range(dp)]
        for data in fresh:
            data.close()
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
                plan, number, micro_batch_size=1, dp_size=2, dp_index=rank
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
        data.evaluation_batches(plan, 3, micro_batch_size=1, dp_size=2, dp_index=0)


def test_evaluation_masks_only_the_rows_beyond_the_plan(tmp_path: Path) -> None:
    write(tmp_path / "x", [56])
    data = loader(tmp_path / "x")
    plan = data.evaluation_plan(steps=10, global_batch_size=4)
    [batch] = data.evaluation_batches(plan, 2, micro_batch_size=4, dp_size=1, dp_index=0)
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum(dim=1).tolist() == [SEQ, SEQ, SEQ, 0]


@pytest.fixture
def three(tmp_path: Path) -> list[TokenSource]:
    """Sources of 4, 10 and 1 samples."""
    for number, (name, length, dtype) in enumerate(
        (("a", 21, "u2"), ("b", 51, "i4"), ("c", 6, "u2"))
    ):
        write(tmp_path / name, [length], first=7 * number, dtype=dtype)
    return [
        TokenSource.open(str(tmp_path / name), SEQ, split="train", valid_fraction=0)
        for name in "abc"
    ]


def test_several_sources(three: list[TokenSource]) -> None:
    """Without weights each sample of all once per epoch; with weights a blend."""
    together = TokenLoader(three, seed=1, vocab_size=VOCAB)
    assert sorted(together.sample_ids(15, 15)) == list(range(15))
    assert [s.num_samples for s in three] == [4, 10, 1]
    expected = {
        i: s.read(k).tolist()
        for i, (s, k) in enumerate((s, k) for s in three for k in range(s.num_samples))
    }
    mixture = Mixture((0.5, 0.25, 0.25), (None,) * 3)
    blend = TokenLoader(three, seed=1, vocab_size=VOCAB, mixture=mixture)
    for data in (together, blend):
        ids = data.sample_ids(0, 40)
        assert rows(data.batches(0, 40, 4, 1, 0)) == [expected[i] for i in ids]
        data.close()
    assert np.bincount(np.searchsorted([4, 14], ids, side="right")).tolist() == [20, 10, 10]


def test_evaluation_batches_are_of_one_source_each(three: list[TokenSource]) -> None:
    """Every sample of all sources once, none of two sources in a batch, padding counts nothing."""
    once = Mixture(None, tuple(s.num_samples for s in three))
    data = TokenLoader(three, seed=1, vocab_size=VOCAB, mixture=once)
    plan = data.evaluation_plan(steps=10, global_batch_size=8)
    assert [(part.source, part.count) for part in plan.batches] == [(0, 4), (1, 8), (1, 2), (2, 1)]
    read: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for number, part in enumerate(plan.batches):
        for rank in range(2):
            for batch in data.evaluation_batches(
                plan, number, micro_batch_size=2, dp_size=2, dp_index=rank
            ):
                mask = torch.ones(2, SEQ) if batch.loss_mask is None else batch.loss_mask
                read[part.source] += [
                    row for row, weight in zip(rows([batch]), mask[:, 0], strict=True) if weight
                ]
    for source, samples in zip(three, read.values(), strict=True):
        assert sorted(samples) == sorted(source.read(k).tolist() for k in range(source.num_samples))
    few = data.evaluation_plan(steps=1, global_batch_size=3)
    # Their shares of three samples, and one of the source that has none.
    assert [(part.source, part.count) for part in few.batches] == [(0, 1), (1, 2), (2, 1)]


def test_sources_are_known_by_content(tmp_path: Path) -> None:
    """The same wherever they lie; another byte, split, sample length or seed is another source."""

    def opened(name: str, seq: int = SEQ, fraction: float = 0.0) -> str:
        return TokenSource.open(
            str(tmp_path / name), seq, split="train", valid_fraction=fraction
        ).identity

    write(tmp_path / "x", [300, 200])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"moved{suffix}").write_bytes((tmp_path / f"x{suffix}").read_bytes())
    assert opened("moved") == opened("x")
    others = [opened("x", seq=6), opened("x", fraction=0.4)]
    content = bytearray((tmp_path / "moved.bin").read_bytes())
    content[-2] ^= 1
    (tmp_path / "moved.bin").write_bytes(content)
    others.append(opened("moved"))
    assert len({*others, opened("x")}) == 4
    a, b = (
        TokenSource.open(str(tmp_path / "x"), SEQ, split="train", valid_fraction=0).planned(s)
        for s in (1, 2)
    )
    assert a.identity == b.identity and a.key != b.key


def test_the_next_steps_are_ready_when_asked_for(tmp_path: Path) -> None:
    """Through a ramp-up, whose sizes are foreseen, and not (the control) without knowing it."""
    write(tmp_path / "x", [2000])
    sizes = [4, 4, 8, 8, 8, 8, 8, 8, 8]

    def size_after(consumed: int) -> int:
        return sizes[int(np.searchsorted(np.cumsum(sizes), consumed, side="right"))]

    misses = {}
    for name, foreseen in {"foreseen": size_after, "control": None}.items():
        data = loader(tmp_path / "x", size_after=foreseen)
        asked: list[int] = []
        original = data._read

        def counted(request: Any, read: Any = original, seen: list[int] = asked) -> Any:
            if threading.current_thread() is threading.main_thread():
                seen.append(request.consumed)
            return read(request)

        data._read = counted  # type: ignore[method-assign]
        consumed = 0
        for size in sizes[:5]:
            data.batches(consumed, size, 2, 1, 0)
            consumed += size
        data.close()
        misses[name] = asked
    assert misses["foreseen"] == [0], "only the first batch was waited for"
    assert misses["control"] == [0, 8]


def test_reading_is_fast(tmp_path: Path) -> None:
    """Random samples of 1024 tokens in microbatches, order and checks included, on one core.

    The limit is 20,000 a second on an idle one; CPU time is taken, as others may use it too.
    """
    stream = np.random.default_rng(0).integers(0, 50_000, 8_000_000)
    with TokenWriter(tmp_path / "x", "u2") as writer:
        writer.add_document(stream)
    source = TokenSource.open(str(tmp_path / "x"), 1024, split="train", valid_fraction=0)
    data = TokenLoader([source], seed=1, vocab_size=50_000)
    data._tokens(np.arange(2048))  # warm
    started, count = time.thread_time(), 8
    for step in range(count):
        data._cut(Rows(data._tokens(np.arange(512) + 512 * step), None), 8, first=0)
    seconds = time.thread_time() - started
    assert 512 * count / seconds > 20_000


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "b", "a"], ["a-1", "b", "a-2"]),
        (["a", "a", "a-1"], ["a-2", "a-3", "a-1"]),
        (["all", "b"], ["all-1", "b"]),
    ],
)
def test_no_two_sets_are_called_alike(names: list[str], unique: list[str]) -> None:
    assert numbered(names) == unique
