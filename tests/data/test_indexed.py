from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data.indexed import IndexedTokens, TokenWriter, dtype_for_vocab, exists
from megads.data.token_format import Header, write_index
from megads.errors import DataError
from tests.cases import case
from tests.data.token_bytes import build, contents, parse, sequences

FOREIGN = [
    "data/synth_u16",
    "data/synth_empty_u16",
    "data/synth_i32",
    "data/topics_a_text_document",
    "data_mds/mmap_u16",
    "data_mds/topics_a_text_document",
]


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> None:
    with TokenWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize("name", FOREIGN)
def test_reads_foreign_files_and_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    prefix = case(f"{name}.idx").with_suffix("")
    expected = json.loads(Path(f"{prefix}.expected.json").read_text())
    file = IndexedTokens(prefix)
    parsed = parse(prefix)
    assert (
        file.sizes.tolist()
        == parsed.sizes
        == expected.get("sequence_lengths", expected.get("sizes"))
    )
    assert file.document_bounds.tolist() == parsed.bounds
    assert parsed.bounds == expected.get("document_indices", expected.get("doc_idx"))
    ids = sequences(prefix)
    assert [file.sequence(i).tolist() for i in range(file.num_sequences)] == ids
    assert file.tokens.tolist() == [token for sequence in ids for token in sequence]
    for head, tail in (("first_sequence_head", "last_sequence_tail"), ("first_head", "last_tail")):
        if head in expected:
            assert file.sequence(0)[:16].tolist() == expected[head]
            assert file.sequence(len(ids) - 1)[-16:].tolist() == expected[tail]
    with TokenWriter(tmp_path / "copy", file.dtype) as writer:
        for d in range(file.num_documents):
            writer.add_document(file.document(d))
    for suffix in ("bin", "idx"):
        written = (tmp_path / f"copy.{suffix}").read_bytes()
        assert hashlib.sha256(written).hexdigest() == expected[f"sha256_{suffix}"]


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=3)),
)
def test_round_trip_of_documents_with_several_or_no_sequences(
    documents: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("round") / "x"
    with TokenWriter(prefix, "i4") as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    file = IndexedTokens(prefix)
    flat = [sequence for document in documents for sequence in document]
    assert [file.sequence(i).tolist() for i in range(file.num_sequences)] == flat
    assert [file.document(d).tolist() for d in range(file.num_documents)] == [
        [token for sequence in document for token in sequence] for document in documents
    ]
    assert file.num_tokens == sum(map(len, flat)) == len(file.tokens)


def test_a_dataset_without_documents(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    file = IndexedTokens(tmp_path / "x.bin")
    assert (file.num_documents, file.num_sequences, file.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize("vocab", [65499, 65500, 65501, 65535, 65536, 65537, 100_000])
def test_number_type_holds_every_id_of_the_vocabulary(vocab: int, tmp_path: Path) -> None:
    dtype = dtype_for_vocab(vocab)
    assert dtype == (np.uint16 if vocab < 65500 else np.int32)
    ids = [0, vocab - 1, vocab // 2]
    write(tmp_path / "x", [ids], dtype.str)
    file = IndexedTokens(tmp_path / "x")
    assert file.tokens.tolist() == ids
    assert file.dtype == dtype  # from the header; nothing else tells the reader


@pytest.mark.parametrize("ids", [[65536], [70000], [-1], np.array([1, 70000]), [1.5]])
def test_an_id_that_does_not_fit_is_refused_and_leaves_nothing(ids: list, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"65536|70000|-1|integers"):
        write(tmp_path / "x", [[1, 2], ids])
    assert list(tmp_path.iterdir()) == []


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    sizes = [2**30] * 3
    header = Header(np.dtype("u2"), sequences=3, marks=4)
    write_index(tmp_path / "big.idx", header, lambda: [np.array(sizes)], [np.arange(4)])
    markers = [np.arange(1 + 5 * d, 6 + 5 * d, dtype="<u2") for d in range(3)]
    with (tmp_path / "big.bin").open("wb") as file:  # sparse: 6 GiB long, a few blocks on disk
        file.truncate(2 * sum(sizes))
        for d, marker in enumerate(markers):
            file.seek(d * 2**31)
            file.write(marker.tobytes())
    assert parse(tmp_path / "big").pointers == [0, 2**31, 2**32]
    tokens = IndexedTokens(tmp_path / "big")
    for d, marker in enumerate(markers):
        assert tokens.document_start(d) == d * 2**30
        assert tokens.document(d)[:5].tolist() == marker.tolist()
    os.truncate(tmp_path / "big.bin", 0)


def test_a_sequence_longer_than_the_format_allows(tmp_path: Path) -> None:
    class Long:
        """Stands for 2**31 ids without holding them."""

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.broadcast_to(np.uint8(1), (2**31,))

    with pytest.raises(DataError, match="2147483648 tokens"):
        write(tmp_path / "x", [Long()])  # type: ignore[list-item]


def damage(prefix: Path, kind: str) -> None:
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    raw = bytearray(idx.read_bytes())
    if kind == "bin short":
        bin_.write_bytes(bin_.read_bytes()[:-1])
    elif kind == "bin long":
        bin_.write_bytes(bin_.read_bytes() + b"\0\0")
    elif kind == "idx short":
        idx.write_bytes(raw[:-3])
    elif kind == "header only":
        idx.write_bytes(raw[:20])
    elif kind == "empty idx":
        idx.write_bytes(b"")
    elif kind == "swapped":
        one, two = idx.read_bytes(), bin_.read_bytes()
        idx.write_bytes(two)
        bin_.write_bytes(one)
    elif kind == "no bin":
        bin_.unlink()
    elif kind == "no idx":
        idx.unlink()
    else:
        at, value = {
            "version": (9, b"\x02"),
            "float code": (17, b"\x07"),
            "wrong width": (17, b"\x04"),
            "legacy": (0, b"TNTIDX\0\0\0"),
            "size": (34 + 4, b"\x09"),
            "bounds": (len(raw) - 8, b"\x01"),
            "bounds order": (len(raw) - 16, b"\xff"),
        }[kind]
        raw[at : at + len(value)] = value
        idx.write_bytes(raw)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bin short", r"x\.bin: 21 bytes, but x\.idx describes 22"),
        ("bin long", r"x\.bin: 24 bytes, but x\.idx describes 22"),
        ("idx short", r"x\.idx: 99 bytes, expected 102"),
        ("header only", r"x\.idx: 20 bytes"),
        ("empty idx", r"x\.idx: not a token index"),
        ("swapped", r"x\.idx: not a token index"),
        ("no bin", r"x\.bin: no such file"),
        ("no idx", r"x\.idx: no such file"),
        ("version", r"x\.idx: format version 2"),
        ("float code", r"x\.idx: number type code 7"),
        ("wrong width", r"x\.bin: 22 bytes"),
        ("legacy", r"x\.idx: written by the older"),
        ("size", r"x\.idx: sequence 1 has 9 tokens"),
        ("bounds", r"x\.idx: the document list"),
        ("bounds order", r"x\.idx: the document list"),
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(
    kind: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "x", [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]])
    IndexedTokens(tmp_path / "x")
    damage(tmp_path / "x", kind)
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "x")


def test_the_tokens_of_another_index(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3], [4, 5]])
    write(tmp_path / "y", [[1, 2, 3], [4]])
    os.replace(tmp_path / "y.bin", tmp_path / "x.bin")
    with pytest.raises(
        DataError, match=r"x\.bin: 8 bytes, but x\.idx describes 10 bytes of uint16"
    ):
        IndexedTokens(tmp_path / "x")


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"PAR1" * 30, b'{"text": "a"}\n' * 9])
def test_a_file_of_another_kind(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.idx: not a token index; it begins with"):
        IndexedTokens(tmp_path / "x")


def test_a_count_beyond_the_file(tmp_path: Path) -> None:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**63, 2**63)
    (tmp_path / "x.idx").write_bytes(head)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match=f"34 bytes, expected {34 + 20 * 2**63} for {2**63} seq"):
        IndexedTokens(tmp_path / "x")


@pytest.mark.parametrize(
    ("code", "ids"),
    [
        (1, [0, 255]),
        (2, [-128, 127]),
        (3, [-(2**15), 2**15 - 1]),
        (4, [65536, 2**31 - 1]),
        (5, [2**40, 70000]),
        (8, [65499, 65535]),
    ],
)
def test_every_number_type_is_read_and_written(code: int, ids: list[int], tmp_path: Path) -> None:
    build(tmp_path / "theirs", [[ids], [[]], [ids[::-1], ids]], code)
    file = IndexedTokens(tmp_path / "theirs")
    assert [file.document(d).tolist() for d in range(3)] == [ids, [], ids[::-1] + ids]
    with TokenWriter(tmp_path / "ours", file.dtype) as writer:
        writer.add_document(ids)
        writer.add_document([])
        writer.add_sequence(ids[::-1])
        writer.add_sequence(ids)
        writer.end_document()
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (34 + 4 * 4687, struct.pack("<i", 2), "sequence 4687 has 2 tokens at byte 4687"),
        (
            34 + 12 * 1_200_000 + 8 * 9374,
            bytes(8),
            "document 4687 begins at sequence 4687, document 9374 at 0",
        ),
    ],
)
def test_a_large_index_is_checked_at_some_places(
    at: int, value: bytes, message: str, tmp_path: Path
) -> None:
    count = 1_200_000  # of which every 4687th is looked at
    header = Header(np.dtype("u1"), count, count + 1)
    ones = np.ones(count, np.int32)
    write_index(tmp_path / "x.idx", header, lambda: [ones], [np.arange(count + 1)])
    (tmp_path / "x.bin").write_bytes(bytes(count))
    assert IndexedTokens(tmp_path / "x").document(count - 1).tolist() == [0]
    with (tmp_path / "x.idx").open("r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "x")


def test_files_appear_only_when_complete(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    with pytest.raises(RuntimeError), TokenWriter(prefix, "u2") as writer:
        writer.add_document([1])
        assert not exists(prefix)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write(prefix, [[1, 2], [3]])
    write(prefix, [[7], [8, 9]])  # replaces both
    assert IndexedTokens(prefix).document(1).tolist() == [8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
