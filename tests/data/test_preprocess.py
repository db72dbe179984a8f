from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from megads.cli.preprocess import main
from megads.data.indexed import IndexedTokens
from megads.data.preprocess import PreprocessStats, preprocess
from megads.errors import DataError
from tests.cases import case

LONG = "long " * 2000


def documents(prefix: Path) -> list[list[int]]:
    file = IndexedTokens(prefix)
    return [file.document(d).tolist() for d in range(file.num_documents)]


@pytest.mark.parametrize("workers", [1, 2])
def test_same_bytes_as_megatron_from_the_same_text(workers: int, tmp_path: Path) -> None:
    text, tokenizer = case("text/topics_a.jsonl"), case("tokenizers/hf_bytelevel_bpe")
    expected = json.loads(case("data/topics_a_text_document.expected.json").read_text())
    stats = preprocess([text], str(tmp_path / "x"), str(tokenizer), workers=workers)
    for suffix in ("bin", "idx"):
        written = (tmp_path / f"x.{suffix}").read_bytes()
        assert hashlib.sha256(written).hexdigest() == expected[f"sha256_{suffix}"]
    assert stats == PreprocessStats(26, 0, 11755, 824, "uint16", 512)


@pytest.mark.parametrize("eod", [True, False])
def test_degenerate_records(eod: bool, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = ["", " ", "a", "caf\u00e9\u6f22", "", LONG, "last"]
    body = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({"text": t}).encode() for t in lines[:4])
    body += b"\r\n\r\n  \n" + b"\n".join(json.dumps({"text": t}).encode() for t in lines[4:])
    source.write_bytes(body)  # byte order mark, CRLF, blank lines, no line end at the end
    stats = preprocess([source], str(tmp_path / "x"), "byte", append_eod=eod)
    wanted = [[*t.encode(), *([256] if eod else [])] for t in lines if t]
    assert documents(tmp_path / "x") == wanted
    assert (stats.documents, stats.empty) == (5, 2)
    assert stats.tokens == sum(map(len, wanted)) == (tmp_path / "x.bin").stat().st_size // 2
    assert stats.longest == len(LONG) + eod


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"no key 'text'; the line has \['body'\]"),
        ('{"text": 3}', "'text' must be a string, found int"),
        ('{"text": null}', "found NoneType"),
        ('["text"]', "expected an object"),
        ('{"text": "x"', "not valid JSON"),
        ('{"text": "\xff"}', "not valid JSON"),
    ],
)
def test_bad_records_are_named_and_leave_nothing(line: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{message}"):
        preprocess([source], str(tmp_path / "out" / "x"), "byte")
    assert list((tmp_path / "out").iterdir()) == []


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude42 \\uD83D."}\n')
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "x"), "byte", append_eod=False)
    assert documents(tmp_path / "x") == [list("\U0001f642 \ufffd.".encode())]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"first\r\npage\fsecond\f\f")
    with gzip.open(tmp_path / "two.txt.gz", "wb") as file:
        file.write(b"whole")
    inputs = [tmp_path / "one.txt", tmp_path / "two.txt.gz"]
    stats = preprocess(inputs, str(tmp_path / "x"), "byte")
    wanted = [b"first\r\npage", b"second", b"whole"]
    assert documents(tmp_path / "x") == [[*text, 256] for text in wanted]
    assert stats.empty == 2
    preprocess(inputs, str(tmp_path / "y"), "byte", split_on="\r\n", append_eod=False)
    assert documents(tmp_path / "y") == [[*b"first"], [*b"page\fsecond\f\f"], [*b"whole"]]
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 text at byte 3"):
        preprocess([tmp_path / "bad.txt"], str(tmp_path / "z"), "byte")


def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        for i in range(700):
            file.write(json.dumps({"content": f"{i} " * (i % 23)}) + "\n")
    results = []
    for workers in (1, 2):
        stats = preprocess(
            [tmp_path / "a.jsonl.gz"],
            str(tmp_path / f"w{workers}"),
            "byte",
            json_key="content",
            workers=workers,
        )
        results.append(
            (stats, *[(tmp_path / f"w{workers}.{s}").read_bytes() for s in ("bin", "idx")])
        )
    assert results[0] == results[1]
    assert results[0][0].empty == len(range(0, 700, 23))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "x")]
    assert main([*arguments, "--no-append-eod"]) == 0
    assert documents(tmp_path / "x") == [[*b"hello"]]
    out = capsys.readouterr().out
    assert "documents  1 (and 0 empty" in out
    assert "tokens     5 " in out
    assert "257, stored as uint16" in out
    assert main(["--input", str(tmp_path / "none.txt"), "--output", str(tmp_path / "y")]) == 2
    assert "none.txt: no such file" in capsys.readouterr().err


def test_a_tokenizer_without_an_end_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("not read")
    arguments = ([tmp_path / "a.jsonl"], str(tmp_path / "x"), str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json has no end-of-document token"):
        preprocess(*arguments)
    (tmp_path / "a.jsonl").write_text('{"text": "b"}')
    assert preprocess(*arguments, append_eod=False).tokens == 1
