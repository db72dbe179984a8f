from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megads.data import chunks, inputs, tables
from megads.data.inputs import open_input, split_stream
from megads.data.preprocess import preprocess, read_documents
from megads.errors import DataError

TEXTS = ["one", "caf\u00e9 \u6f22\U0001f600\n\t", "", "x" * 300, " ", "\f", "last, longer " * 9]


def json_lines(texts: list[str]) -> bytes:
    """With a byte order mark, blank lines, both kinds of line end, and none at the end."""
    first, *rest = (json.dumps({"text": t, "n": 1}, ensure_ascii=False).encode() for t in texts)
    return b"\xef\xbb\xbf" + first + b"\r\n\n  \n" + b"\n".join(rest)


def cut(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (chunks, inputs, tables):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)


def read(path: Path | str) -> list[str]:
    return list(read_documents(path, "text", "\f"))


def pack_zst(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": pack_zst,
}


@pytest.mark.parametrize("packing", PACKERS)
def test_json_lines_are_read_once_however_they_are_cut(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json_lines(TEXTS)
    path = tmp_path / f"a.jsonl{packing}"
    # Two members or frames one after the other are one file.
    path.write_bytes(PACKERS[packing](data[:100]) + PACKERS[packing](data[100:]))
    counts = set()
    for size in (*range(1, 40), 64, 200, 1000, 1 << 20):
        cut(monkeypatch, size)
        source = open_input(path, "text", "\f")
        parts = list(source.chunks())
        assert [text for part in parts for text in part.texts()] == TEXTS, size
        assert sum(part.size for part in parts) == len(data)
        assert sum(part.packed for part in parts) == source.size == path.stat().st_size
        counts.add(len(parts))
    assert len(counts) > 5  # they were cut in many ways


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("separator", ["\f", "\n\n", "<|sep|>", "aa"])
def test_text_is_split_as_python_splits_it(
    packing: str, separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"caf\u00e9{separator}aaa\n\n\n{separator * 2}\u6f22\U0001f600{separator}" + "x" * 90
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](b"\xef\xbb\xbf" + text.encode()))
    for size in (1, 2, 7, 50, 1 << 20):
        cut(monkeypatch, size)
        assert list(read_documents(path, "text", separator)) == text.split(separator)


@given(st.lists(st.binary(max_size=6)), st.sampled_from([b"a", b"aa", b"aba", b"\x00\x01"]))
def test_splitting_a_stream(blocks: list[bytes], separator: bytes) -> None:
    blocks = [bytes(b"ab"[x % 2] if x > 20 else x for x in block) for block in blocks]
    assert list(split_stream(iter(blocks), separator)) == b"".join(blocks).split(separator)


def test_the_bad_line_is_named_wherever_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [b'{"text": "%d"}' % i for i in range(50)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good[:40], b"{", *good[40:]]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for size in (3, 64, 1 << 20):
        cut(monkeypatch, size)
        for name in ("a.jsonl", "a.jsonl.gz"):
            with pytest.raises(DataError, match=rf"{name}, line 41: not valid JSON"):
                read(tmp_path / name)


@pytest.mark.parametrize("line", [b'{"text": "\xed\xa0\x80"}', b"[" * 100_000])
def test_json_that_no_tokenizer_could_take(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: not (valid|readable) JSON"):
        read(tmp_path / "a.jsonl")


def test_utf8_errors_are_counted_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 8)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\fdefghijkl\fmn\xffop")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text at byte 19"):
        read(tmp_path / "a.txt")


def damaged(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "truncated": data[: len(data) - 3],
        "half": data[:middle],
        "empty": b"",
        "foreign": b"text\n" * 9,
        "changed": data[:middle] + bytes([data[middle] ^ 0xFF] * 9) + data[middle + 9 :],
    }


@pytest.mark.parametrize("damage", damaged(b"0"))
@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet"])
def test_damaged_files_are_named(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    texts = [f"{i} {i * i % 977} caf\u00e9" for i in range(4000)]
    if suffix == ".parquet":
        write_parquet(path, texts)
        good = path.read_bytes()
    else:
        good = PACKERS[path.suffix](json_lines(texts))
        path.write_bytes(good)
    assert read(path)
    path.write_bytes(damaged(good)[damage])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=rf"a\{suffix}"):
        preprocess([path], str(tmp_path / "out" / "x"), "byte")
    assert list((tmp_path / "out").iterdir()) == []


def write_parquet(path: Path, texts: list[Any], kind: str = "string", **more: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    column = pa.array(texts, getattr(pa, kind)())
    table = pa.table({"n": pa.array(range(len(texts))), "text": column})
    pyarrow.parquet.write_table(table, path, **more)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_parquet(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TEXTS * 100
    write_parquet(tmp_path / "a.parquet", texts, kind, row_group_size=150)
    for size in (1, 1000, 1 << 20):
        cut(monkeypatch, size)
        source = open_input(tmp_path / "a.parquet", "text", "\f")
        parts = list(source.chunks())
        assert [text for part in parts for text in part.texts()] == texts
        assert sum(part.packed for part in parts) == source.size
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body'; .*'n', 'text'"):
        open_input(tmp_path / "a.parquet", "body", "\f")
    with pytest.raises(DataError, match=r"a\.parquet: column 'n' must hold strings, found int64"):
        open_input(tmp_path / "a.parquet", "n", "\f")
    write_parquet(tmp_path / "b.parquet", ["a", "b", None])
    with pytest.raises(DataError, match=r"b\.parquet, row 2: 'text' must be a string.*NoneType"):
        read(tmp_path / "b.parquet")


def test_folders_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    other = datasets.Dataset.from_dict({"text": ["other"]})
    part.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": part, "test": other}).save_to_disk(tmp_path / "both")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(json.dumps({"text": "streamed"}) + "\n")
    assert read(tmp_path / "one") == TEXTS
    assert read(f"hf:{tmp_path / 'both'}") == TEXTS
    assert read(f"hf:{tmp_path / 'both'}@test") == ["other"]
    assert read(f"hf:{tmp_path / 'files'}") == ["streamed"]
    before = open_input(f"hf:{tmp_path / 'files'}", "text", "\f").identity
    (tmp_path / "files" / "train.jsonl").write_text(json.dumps({"text": "changed"}) + "\n\n")
    assert open_input(f"hf:{tmp_path / 'files'}", "text", "\f").identity != before
    for spec, message in [
        (f"hf:{tmp_path / 'both'}@valid", r"no split 'valid'; there are \['test', 'train'\]"),
        (str(tmp_path / "files"), "name its files, or hf:"),
        (f"hf:{tmp_path / 'none'}", "cannot be opened"),
    ]:
        with pytest.raises(DataError, match=message):
            open_input(spec, "text", "\f")
    with pytest.raises(DataError, match=r"one: no column 'body'; there are \['text', 'n'\]"):
        open_input(tmp_path / "one", "body", "\f")


@pytest.mark.parametrize(
    ("spec", "package"),
    [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow"), ("hf:name", "datasets")],
)
def test_a_package_that_is_missing(
    spec: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt.zst").touch()
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        DataError, match=rf"{spec} needs the package {package}: pip install 'megads"
    ):
        open_input(spec, "text", "\f")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".jsonl.gz"])
def test_memory_is_bounded_by_the_longest_document(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    record = b'{"text": "' + b"word " * 20_000 + b'"}\n'
    end = b"" if ".jsonl" in suffix else b"\f"
    data = (record + end) * 240  # 24 MB
    path.write_bytes(PACKERS["" if path.suffix == ".txt" else path.suffix](data))
    source = open_input(path, "text", "\f")
    tracemalloc.start()
    total = sum(chunk.size for chunk in source.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) <= total <= len(data) + 1
    assert peak < 10e6


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    for name in ("none.txt", "none.parquet", "none.jsonl.zst"):
        with pytest.raises(DataError, match=f"{name}: no such file"):
            open_input(tmp_path / name, "text", "\f")
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="must not be empty"):
        open_input(tmp_path / "a.txt", "text", "")
