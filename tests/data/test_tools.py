from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megads.cli import inspect_tokens, merge_tokens, train_tokenizer, verify_tokens
from megads.data import inspection
from megads.data.indexed import IndexedTokens
from megads.data.inspection import TokenFacts, token_facts, verify
from megads.data.token_format import Header, write_index
from megads.data.tokenizer import load_tokenizer
from tests.cases import case
from tests.data.token_bytes import build, sequences

DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6]], [], [[]], [[7, 8, 9, 10, 65535]]]
FOREIGN = [
    "data/synth_u16",
    "data/synth_empty_u16",
    "data/synth_i32",
    "data/topics_a_text_document",
    "data_mds/mmap_u16",
    "data_mds/topics_a_text_document",
]


def poke(path: Path, at: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    at = at if at >= 0 else len(raw) + at
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_systems_are_in_order(name: str) -> None:
    prefix = case(f"{name}.idx").with_suffix("")
    expected = json.loads(Path(f"{prefix}.expected.json").read_text())
    lengths = expected.get("sequence_lengths", expected.get("sizes"))
    largest = max(max(ids) for ids in sequences(prefix) if ids)
    assert token_facts(IndexedTokens(prefix)) == TokenFacts(
        dtype=expected.get("dtype", "uint16"),
        documents=len(lengths),
        sequences=len(lengths),
        tokens=sum(lengths),
        empty=lengths.count(0),
        longest=max(lengths),
        shortest=min(lengths),
        bin_bytes=Path(f"{prefix}.bin").stat().st_size,
        idx_bytes=Path(f"{prefix}.idx").stat().st_size,
    )
    result = verify(prefix, largest + 1)
    assert (result.problems, result.tokens, result.largest_id) == ((), sum(lengths), largest)
    assert f"is {largest}, in sequence" in verify(prefix, largest).problems[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_facts_in_pieces(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "x", DOCUMENTS)
    monkeypatch.setattr(inspection, "CHUNK", chunk)
    facts = token_facts(IndexedTokens(tmp_path / "x"))
    assert (facts.documents, facts.sequences, facts.tokens, facts.empty) == (5, 5, 11, 2)
    assert (facts.longest, facts.shortest) == (5, 0)
    assert verify(tmp_path / "x").problems == ()


def test_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "x", [])
    assert inspect_tokens.main([str(tmp_path / "x")]) == 0
    assert "length     0 to 0 tokens" in capsys.readouterr().out
    assert verify_tokens.main([str(tmp_path / "x"), "--tokenizer", "byte"]) == 0
    assert "0 documents, 0 tokens, no ids: nothing is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "at", "value", "message"),
    [
        ("idx", 34 + 4, b"\x09", "sequence 1 has 9 tokens at byte 6, so the next belongs at 24"),
        ("idx", 34 + 4, b"\xff\xff\xff\xff", "sequence of negative length: sequence 1 has -1"),
        ("idx", 34 + 20, b"\x02", "sequence 0 begins at byte 2, expected 0"),
        ("idx", 34 + 28, b"\x07", "sequence 0 has 3 tokens at byte 0, so the next belongs at 6"),
        ("idx", -16, b"\x01", "document 3 begins at sequence 3, the next at 1"),
        ("idx", -8, b"\x06", r"from 0 to the number of sequences, 5; it holds \[0, 6\]"),
        ("idx", 0, b"X", "not a token index"),
        ("idx", 17, b"\x04", r"x\.bin: 22 bytes, but x\.idx describes 32"),
        ("idx", 17, b"\x03", "token 10 is -1"),
        ("bin", 2, b"\x00\x01", r"token 1 is 256, in sequence 0"),
    ],
)
def test_every_entry_is_read(
    file: str, at: int, value: bytes, message: str, tmp_path: Path
) -> None:
    build(tmp_path / "x", DOCUMENTS)
    build(tmp_path / "other", [[[0]]])
    poke(tmp_path / f"x.{file}", at, value)
    vocab_size = 256 if file == "bin" else None
    problems = verify(tmp_path / "x", vocab_size).problems
    assert problems
    assert any(re.search(message, problem) for problem in problems)


def test_all_problems_at_once_and_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "x", [[[300 + i]] for i in range(20)])
    prefix = str(tmp_path / "x")
    assert verify_tokens.main([prefix]) == 0
    assert verify_tokens.main([prefix, "--vocab-size", "320"]) == 0
    assert "20 documents, 20 tokens, ids up to 319: nothing is wrong" in capsys.readouterr().out
    poke(tmp_path / "x.idx", 34 + 4 * 7, b"\x03")
    poke(tmp_path / "x.idx", -8 * 10, b"\x01")
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes() + b"\0")
    assert verify_tokens.main([prefix, "--tokenizer", "byte"]) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line for line in lines if "41 bytes" in line and "40 bytes" in line]
    assert [line for line in lines if "sequence 7 has 3 tokens" in line]
    assert [line for line in lines if "document 10 begins at sequence 10, the next at 1" in line]
    ids = [line for line in lines if "outside the vocabulary of 257 ids" in line]
    assert "token 0 is 300" in ids[0]
    assert ids[-1].endswith("and 15 more")
    assert len(ids) == 6
    assert len(lines) == 9
    assert verify_tokens.main([str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.count("no such file") == 2


def test_verifying_finds_what_opening_passes_over(tmp_path: Path) -> None:
    """Opening a large index looks at a few places; the file is of more than a million sequences."""
    count = 1_100_001
    header = Header(np.dtype("u1"), count, count + 1)
    ones = np.ones(count, np.int32)
    write_index(tmp_path / "x.idx", header, lambda: [ones], [np.arange(count + 1)])
    (tmp_path / "x.bin").write_bytes(bytes(count))
    assert verify(tmp_path / "x").problems == ()
    poke(tmp_path / "x.idx", 34 + 4 * 1_050_001, struct.pack("<i", 2))
    IndexedTokens(tmp_path / "x")
    [problem] = verify(tmp_path / "x").problems
    assert "sequence 1050001 has 2 tokens" in problem


def test_inspect_prints_facts_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["first", "", "third: 中", "x" * 100]
    build(tmp_path / "x", [[[*text.encode(), 256]] for text in texts])
    assert (
        inspect_tokens.main([f"{tmp_path / 'x'}.bin", "--tokenizer", "byte", "--documents", "9"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "documents  4 (4 sequences, 0 empty)",
        "tokens     119, stored as uint16",
        "length     1 to 101 tokens a document",
        "size       238 and 122 bytes",
    ]
    assert lines[5:8] == [
        "document 0, 6 tokens: 'first'",
        "document 1, 1 tokens: ''",
        "document 2, 11 tokens: 'third: 中'",
    ]
    assert lines[8] == f"document 3, 101 tokens: '{'x' * 64}' ..."
    assert inspect_tokens.main([str(tmp_path / "x"), "--documents", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[5:] == [
        "document 0, 6 tokens: 102 105 114 115 116 256"
    ]
    build(tmp_path / "y", [[[300]]])
    assert inspect_tokens.main([str(tmp_path / "y"), "--tokenizer", "byte"]) == 2
    assert "holds id 300, but tokenizer byte has 257 ids" in capsys.readouterr().err
    assert inspect_tokens.main([str(tmp_path / "missing")]) == 2


def test_merge_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "a", [[[1, 2]]])
    build(tmp_path / "b", [[[70000]]], code=4)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert merge_tokens.main(["--input", a, b, "--output", c]) == 0
    out = capsys.readouterr().out
    assert "tokens     3, stored as int32" in out
    assert f"widened    {a} to int32" in out
    assert sequences(tmp_path / "c") == [[1, 2], [70000]]
    assert merge_tokens.main(["--input", a, b, "--output", b]) == 2
    assert "is an input and the output" in capsys.readouterr().err


WORDS = ["tree", "river", "stone", "cloud", "quick", "fox", "jumping", "over", "lazy", "mice"]
TEXT = "".join(f"The {a}  {b}\tof {a}{b}s.\n" for a in WORDS for b in WORDS)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_trained_tokenizer_keeps_every_text(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT + "y" * 9000)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": TEXT}) + "\n")
    models = [tmp_path / "one.model", tmp_path / "deep" / "two.model"]
    for model in models:
        inputs = ["--input", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
        options = ["--vocab-size", "300", "--model-type", model_type, "--json-key", "body"]
        assert train_tokenizer.main([*inputs, "--output", str(model), *options]) == 0
    assert models[0].read_bytes() == models[1].read_bytes()
    assert not list(tmp_path.glob("*tmp*"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(models[0]))
    assert processor.get_piece_size() == 300
    assert [processor.id_to_piece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    for text in (TEXT, "  two  \n\n \t", "naïve 中文 🙂 ﬁ Å", "", "\r\n", "\x00x"):
        assert processor.decode(processor.encode(text)) == text
    pieces = {processor.id_to_piece(i) for i in range(300)}
    assert "y" in pieces  # of a line longer than sentencepiece reads
    tokenizer = load_tokenizer(str(models[0]))
    assert tokenizer.eod == 2
    assert processor.unk_id() not in tokenizer.encode("中🙂")


def test_without_byte_fallback_unseen_characters_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    model = tmp_path / "m.model"
    options = ["--vocab-size", "60", "--no-byte-fallback", "--output", str(model)]
    assert train_tokenizer.main(["--input", str(tmp_path / "a.txt"), *options]) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert processor.unk_id() in processor.encode("中")
    assert processor.get_piece_size() == 60


@pytest.mark.parametrize(
    ("text", "name", "size", "message"),
    [
        (TEXT, "m.model", "100000", r"100000 pieces: Vocabulary size too high .* <= \d+"),
        (TEXT, "m.model", "100", "100 pieces: Vocabulary size is smaller than required_chars"),
        ("", "m.model", "300", "the inputs hold no text"),
        (TEXT, "m.bin", "300", "ends in .model"),
        (b"\xff\xfe", "m.model", "300", "not UTF-8 text"),
        (None, "m.model", "300", r"a\.txt: no such file"),
    ],
)
def test_a_tokenizer_that_cannot_be_trained(
    text: str | bytes | None,
    name: str,
    size: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        raw = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "a.txt").write_bytes(raw)
    arguments = ["--input", str(tmp_path / "a.txt"), "--vocab-size", size]
    assert train_tokenizer.main([*arguments, "--output", str(tmp_path / name)]) in (1, 2)
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / name).exists()
