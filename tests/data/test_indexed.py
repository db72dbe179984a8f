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

from megads.data.indexed import IndexedTokens, TokenWriter, dtype_for_vocab, exists, write_index
from megads.errors import DataError
from tests.cases import case

FOREIGN = [
    "data/synth_u16",
    "data/synth_empty_u16",
    "data/synth_i32",
    "data/topics_a_text_document",
    "data_mds/mmap_u16",
    "data_mds/topics_a_text_document",
]


def parse(prefix: Path) -> tuple[int, list[int], list[int], list[int]]:
    """An index read with struct alone: number type code, sizes, pointers, document bounds."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, n, m = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    at = 34
    sizes = list(struct.unpack_from(f"<{n}i", raw, at))
    pointers = list(struct.unpack_from(f"<{n}q", raw, at + 4 * n))
    bounds = list(struct.unpack_from(f"<{m}q", raw, at + 12 * n))
    assert len(raw) == at + 12 * n + 8 * m
    return code, sizes, pointers, bounds


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> None:
    with TokenWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize("name", FOREIGN)
def test_reads_foreign_files_and_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    prefix = case(f"{name}.idx").with_suffix("")
    expected = json.loads(Path(f"{prefix}.expected.json").read_text())
    file = IndexedTokens(prefix)
    code, sizes, pointers, bounds = parse(prefix)
    assert file.sizes.tolist() == sizes == expected.get("sequence_lengths", expected.get("sizes"))
    assert file.document_bounds.tolist() == bounds
    assert bounds == expected.get("document_indices", expected.get("doc_idx"))
    raw = Path(f"{prefix}.bin").read_bytes()
    letter = {8: "H", 4: "i"}[code]
    for i, (size, pointer) in enumerate(zip(sizes, pointers, strict=True)):
        assert file.sequence(i).tolist() == list(
            struct.unpack_from(f"<{size}{letter}", raw, pointer)
        )
    for head, tail in (("first_sequence_head", "last_sequence_tail"), ("first_head", "last_tail")):
        if head in expected:
            assert file.sequence(0)[:16].tolist() == expected[head]
            assert file.sequence(len(sizes) - 1)[-16:].tolist() == expected[tail]
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
    write_index(tmp_path / "big.idx", sizes, [0, 1, 2, 3], "u2")
    markers = [np.arange(1 + 5 * d, 6 + 5 * d, dtype="<u2") for d in range(3)]
    with (tmp_path / "big.bin").open("wb") as file:  # sparse: 6 GiB long, a few blocks on disk
        file.truncate(2 * sum(sizes))
        for d, marker in enumerate(markers):
            file.seek(d * 2**31)
            file.write(marker.tobytes())
    assert parse(tmp_path / "big")[2] == [0, 2**31, 2**32]
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
