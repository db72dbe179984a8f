from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data import inspection, token_format
from megads.data import merge as merge_module
from megads.data.indexed import IndexedTokens
from megads.data.merge import merge
from megads.errors import DataError
from tests.cases import case
from tests.data.token_bytes import build, contents, parse, sequences

A = [[[1, 2, 3]], [[4, 5]]]
B = [[[6, 7, 8, 9]], [[10]], [[11, 12, 13, 14, 15]]]
C: list[list[list[int]]] = []


@pytest.mark.parametrize("names", ["AB", "ACB", "AA", "C", "CC", "CA", "A"])
def test_documents_one_after_the_other(names: str, tmp_path: Path) -> None:
    parts = {"A": A, "B": B, "C": C}
    for name, documents in parts.items():
        build(tmp_path / name, documents)
    stats = merge([str(tmp_path / name) for name in names], str(tmp_path / "all"))
    whole = [document for name in names for document in parts[name]]
    build(tmp_path / "expected", whole)
    assert contents(tmp_path / "all") == contents(tmp_path / "expected")
    assert parse(tmp_path / "all").bounds == list(range(len(whole) + 1))
    assert stats.documents == stats.sequences == len(whole)
    assert stats.tokens == sum(len(sequence) for document in whole for sequence in document)
    assert IndexedTokens(tmp_path / "all").num_documents == len(whole)


def test_a_document_list_without_offset_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_offset(files: list[IndexedTokens]) -> list[np.ndarray]:
        return [np.zeros(1, np.int64), *(file.document_bounds[1:] for file in files)]

    build(tmp_path / "A", A)
    build(tmp_path / "B", B)
    monkeypatch.setattr(merge_module, "_bounds", without_offset)
    merge([str(tmp_path / "A"), str(tmp_path / "B")], str(tmp_path / "all"))
    with pytest.raises(DataError, match="document list"):
        IndexedTokens(tmp_path / "all")


documents = st.lists(st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=3), max_size=6)


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.tuples(documents, st.sampled_from([1, 3, 4, 5, 8])), max_size=4))
def test_any_documents_in_pieces_of_any_size(
    parts: list[tuple[list[list[list[int]]], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = [([[[255, 256], []], []], 8), *parts]  # documents of two sequences and of none
    folder = tmp_path_factory.mktemp("merge")
    for number, (part, code) in enumerate(parts):
        build(folder / str(number), part, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_format, "CHUNK", 3)
        patch.setattr(inspection, "CHUNK", 3)
        patch.setattr(inspection, "_TOKENS_AT_ONCE", 4)
        stats = merge([str(folder / str(n)) for n in range(len(parts))], str(folder / "all"))
    filled = {code for part, code in parts if any(ids for document in part for ids in document)}
    # uint16 with int16 needs int32; every other pair is held by the wider of the two.
    code = 5 if 5 in filled else 4 if filled & {4, 3} else 8
    build(folder / "expected", [document for part, _ in parts for document in part], code)
    assert contents(folder / "all") == contents(folder / "expected")
    assert len(stats.widened) == sum(
        c != code and any(ids for document in part for ids in document) for part, c in parts
    )


def test_unequal_number_types_are_widened_and_named(tmp_path: Path) -> None:
    build(tmp_path / "narrow", [[[65535, 0]]], code=8)
    build(tmp_path / "wide", [[[70000]]], code=4)
    build(tmp_path / "empty", [], code=5)
    inputs = [str(tmp_path / name) for name in ("narrow", "wide", "empty")]
    stats = merge(inputs, str(tmp_path / "all"))
    assert sequences(tmp_path / "all") == [[65535, 0], [70000]]
    assert (stats.dtype, stats.widened) == ("int32", (inputs[0],))


@pytest.mark.parametrize("kind", ["same", "suffix", "symlink", "hard link"])
def test_an_input_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    build(tmp_path / "A", A)
    build(tmp_path / "B", B)
    output = tmp_path / "B" if kind in ("same", "suffix") else tmp_path / "other"
    for suffix in (".bin", ".idx"):
        if kind == "symlink":
            Path(f"{output}{suffix}").symlink_to(tmp_path / f"B{suffix}")
        elif kind == "hard link":
            os.link(tmp_path / f"B{suffix}", f"{output}{suffix}")
    before = contents(tmp_path / "B")
    with pytest.raises(DataError, match="is an input and the output"):
        merge(
            [str(tmp_path / "A"), str(tmp_path / "B")],
            f"{output}.bin" if kind == "suffix" else str(output),
        )
    assert contents(tmp_path / "B") == before
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_nothing_to_merge_and_missing_inputs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to merge"):
        merge([], str(tmp_path / "all"))
    build(tmp_path / "A", A)
    with pytest.raises(DataError, match=r"missing\.idx: no such file"):
        merge([str(tmp_path / "A"), str(tmp_path / "missing")], str(tmp_path / "all"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.bin", "A.idx"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "A", A)
    build(tmp_path / "all", B)
    before = contents(tmp_path / "all")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(merge_module, "write_index", full)
    with pytest.raises(OSError, match="No space"):
        merge([str(tmp_path / "A")], str(tmp_path / "all"))
    assert contents(tmp_path / "all") == before
    assert len(list(tmp_path.iterdir())) == 4


def test_files_of_other_systems(tmp_path: Path) -> None:
    names = ["data/synth_u16", "data/synth_empty_u16", "data_mds/mmap_u16", "data/synth_i32"]
    prefixes = [case(f"{name}.idx").with_suffix("") for name in names]
    same = merge([str(prefix) for prefix in prefixes[:3]], str(tmp_path / "same"))
    bins = b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes[:3])
    assert contents(tmp_path / "same")[0] == bins
    assert (same.dtype, same.widened) == ("uint16", ())
    assert parse(tmp_path / "same").bounds == list(range(40 + 25 + 30 + 1))
    mixed = merge([str(prefix) for prefix in prefixes], str(tmp_path / "mixed"))
    assert sequences(tmp_path / "mixed") == [s for p in prefixes for s in sequences(p)]
    assert (mixed.dtype, len(mixed.widened)) == ("int32", 3)
