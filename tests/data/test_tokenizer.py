from __future__ import annotations

import base64
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from megads.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    require_eod,
    tokenizer_identity,
)
from megads.errors import DataError
from tests.cases import case


def random_texts(count: int) -> list[str]:
    rng = random.Random(11)
    ranges = [(32, 127), (160, 0x500), (0x4E00, 0x9FFF), (0x1F300, 0x1F650)]

    def letter() -> str:
        low, high = rng.choice(ranges)
        return chr(rng.randrange(low, high))

    return ["x" + "".join(letter() for _ in range(rng.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "eos"),
    [("hf_bytelevel_bpe/tokenizer.json", 0), ("spm_bpe_llama/tokenizer.model", 2)],
)
def test_ids_of_other_tools(name: str, eos: int) -> None:
    path = case(f"tokenizers/{name}")
    expected = json.loads((path.parent / "expected.json").read_text())
    for spec in (str(path), str(path.parent)):
        tokenizer = load_tokenizer(spec)
        assert tokenizer.vocab_size == expected["vocab_size"]
        assert require_eod(tokenizer) == expected["eos_id"] == eos
        for sample in expected["cases"]:
            assert tokenizer.encode(sample["text"]) == sample["ids"]
            assert tokenizer.decode(sample["ids"]) == sample["decoded"]
        texts = [sample["text"] for sample in expected["cases"]]
        batch = tokenizer.encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [sample["ids"] for sample in expected["cases"]]
        assert {ids.dtype.name for ids in batch} == {"int32"}


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    for text in ["", "a\r\n\t", *random_texts(50)]:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.encode_batch([text])[0].tolist() == list(text.encode())
        assert tokenizer.decode([*tokenizer.encode(text), 256, 300]) == text
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


@pytest.fixture(scope="module")
def byte_fallback_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sentencepiece model trained on ASCII, with byte fallback and without an eos piece."""
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text("\n".join(f"the cat number {i} sat" for i in range(300)))
    spm.SentencePieceTrainer.Train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "small"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        eos_id=-1,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "small.model"


def test_byte_fallback_survives(byte_fallback_model: Path) -> None:
    import sentencepiece

    direct = sentencepiece.SentencePieceProcessor(model_file=str(byte_fallback_model))
    tokenizer = SentencePieceTokenizer(byte_fallback_model)
    for text in ["caf\u00e9 \u6f22\U0001f600\n\t", *random_texts(200)]:
        ids = tokenizer.encode(text)
        assert ids == direct.encode(text)
        assert direct.unk_id() not in ids
        assert tokenizer.decode(ids) == text


def test_byte_fallback_gives_the_ids_of_the_fast_tokenizer(
    byte_fallback_model: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(byte_fallback_model.read_bytes())
    fast = transformers.LlamaTokenizerFast.from_pretrained(str(tmp_path), legacy=True)
    tokenizer = load_tokenizer(str(tmp_path))
    texts = ["caf\u00e9 \u6f22\U0001f600\n\t", *random_texts(50)]
    for text in texts:
        ids = fast.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == tokenizer.encode_batch([text])[0].tolist() == ids
    # Without the fallback this file, which has no unknown token either, loses characters.
    state = json.loads(fast.backend_tokenizer.to_str())
    assert state["model"]["byte_fallback"]
    state["model"]["byte_fallback"] = False
    (tmp_path / "plain.json").write_text(json.dumps(state))
    plain = load_tokenizer(str(tmp_path / "plain.json"))
    assert len(plain.encode(texts[0])) < len(tokenizer.encode(texts[0]))


def test_no_end_of_document_is_an_error_that_names_the_tokenizer(byte_fallback_model: Path) -> None:
    tokenizer = load_tokenizer(str(byte_fallback_model))
    assert tokenizer.eod is None
    with pytest.raises(DataError, match=str(byte_fallback_model)):
        require_eod(tokenizer)


@pytest.fixture
def added_tokens(tmp_path: Path) -> Path:
    """100 base ids, three added ones, and a post-processor that wraps every text in markers."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    vocabulary = {f"w{i}": i for i in range(98)} | {"<unk>": 98, "</s>": 99}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<|endoftext|>"])
    backend.add_tokens([AddedToken("<tool>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <|endoftext|>", special_tokens=[("<bos>", 100), ("<|endoftext|>", 101)]
    )
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def test_vocabulary_counts_added_tokens_and_no_marker_is_added(added_tokens: Path) -> None:
    tokenizer = HuggingFaceTokenizer(added_tokens)
    assert tokenizer.vocab_size == 103
    assert tokenizer.encode("w1 <tool> w2") == [1, 102, 2]
    assert tokenizer.eod == 101
    config = added_tokens.with_name("tokenizer_config.json")
    for value in ("</s>", {"content": "</s>", "lstrip": False}):
        config.write_text(json.dumps({"eos_token": value}))
        assert HuggingFaceTokenizer(added_tokens).eod == 99
    config.write_text(json.dumps({"eos_token": "not in the vocabulary"}))
    with pytest.raises(DataError, match=r"tokenizer\.json has no end-of-document"):
        require_eod(HuggingFaceTokenizer(added_tokens))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.model").write_bytes(b"nothing of the kind")
    (tmp_path / "bad.vocab").write_text("")
    for name in ("none.json", "bad.json", "bad.model", "bad.vocab", ""):
        with pytest.raises(DataError, match=str(tmp_path)):
            load_tokenizer(str(tmp_path / name))


@pytest.fixture
def rank_file(tmp_path: Path) -> Path:
    """Single bytes in an order of their own, and tokens that merges of two earlier ones make."""
    rng, tokens = random.Random(4), [bytes([value]) for value in range(256)]
    rng.shuffle(tokens)
    words = [
        b" th",
        b" the",
        b"th",
        b"he",
        b" t",
        b"'s",
        b"12",
        b"123",
        b"\n\n",
        b"  ",
        b"\xc3\xa9",
        b"t's",
    ]
    for word in sorted(words, key=len):
        tokens.append(word)
    path = tmp_path / "x.tiktoken"
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
    )
    return path


SPLIT_TEXTS = [
    "the cat's 12345 The\n\n  then   he'LL\t\r\n \n x",
    "caf\u00e9 \u6f22\U0001f600!?\n<|endoftext|> end  ",
    "",
]


def read_ranks(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def test_ranks_are_used_as_cl100k_base_uses_its_own(
    rank_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: read_ranks(rank_file))
    made: dict[str, Any] = public.cl100k_base()
    oracle = tiktoken.Encoding(**made)
    other = tiktoken.Encoding(**(public.o200k_base() | {"name": "other"}))
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(str(rank_file))
    assert "pattern of cl100k_base" in caplog.text and "'<|endoftext|>': 268" in caplog.text
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.unknown) == (269, 268, None)
    texts = [*SPLIT_TEXTS, *random_texts(100)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode_ordinary(text)
        assert tokenizer.encode_batch([text])[0].tolist() == ids
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < 268  # special tokens in a text are plain text
    assert any(tokenizer.encode(text) != other.encode_ordinary(text) for text in texts)


def test_what_is_beside_the_ranks_decides(rank_file: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    before = tokenizer_identity(str(rank_file))
    settings = {"pat_str": r"\w+|\W", "special_tokens": {"</s>": 300, "<pad>": 301}}
    beside = rank_file.with_name("x.tiktoken.json")
    beside.write_text(json.dumps(settings))
    assert tokenizer_identity(str(rank_file)) != before
    tokenizer = load_tokenizer(str(rank_file))
    oracle = tiktoken.Encoding("x", mergeable_ranks=read_ranks(rank_file), **settings)
    assert (tokenizer.vocab_size, tokenizer.eod) == (302, 300)
    for text in SPLIT_TEXTS:
        assert tokenizer.encode(text) == oracle.encode_ordinary(text)
    assert tokenizer.decode([300, 299, *oracle.encode_ordinary("x"), 270]) == "</s>x"
    beside.write_text('{"pat_str": "x"}')
    with pytest.raises(DataError, match=r"x\.tiktoken\.json: expected .* special_tokens"):
        load_tokenizer(str(rank_file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"!!! 300\n", "line 269: expected a token in base 64"),
        (lambda data: data + b"YWJj\n", "line 269"),
        (lambda data: data[20:], "(line 1: expected|of the 256 single bytes have no rank)"),
        (lambda data: data + b"YWJj 5\n", "ranks must differ"),
        (lambda data: b"", "256 of the 256 single bytes"),
    ],
)
def test_damaged_ranks(rank_file: Path, change: Any, message: str) -> None:
    pytest.importorskip("tiktoken")
    rank_file.write_bytes(change(rank_file.read_bytes()))
    with pytest.raises(DataError, match=rf"x\.tiktoken.*{message}"):
        load_tokenizer(str(rank_file))


def test_encodings_by_name(rank_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    with pytest.raises(DataError, match=r"tokenizer tiktoken:none: tiktoken knows .*cl100k_base"):
        load_tokenizer("tiktoken:none")
    encoding = tiktoken.Encoding(
        "e",
        pat_str=".",
        mergeable_ranks=read_ranks(rank_file),
        special_tokens={"<|endoftext|>": 400},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"cl100k_base": encoding}.__getitem__)
    tokenizer = load_tokenizer("tiktoken:cl100k_base")
    assert (tokenizer.name, tokenizer.eod, tokenizer.vocab_size) == (
        "tiktoken:cl100k_base",
        400,
        401,
    )
    assert tokenizer_identity("tiktoken:cl100k_base") == "tiktoken:cl100k_base"

    def offline(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match=r"cannot be fetched \(no route\).*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("tiktoken:cl100k_base")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for spec in ("tiktoken:cl100k_base", str(rank_file)):
        with pytest.raises(DataError, match=rf"{spec} needs the package tiktoken: pip install"):
            load_tokenizer(spec)


def test_the_unknown_id(tmp_path: Path, byte_fallback_model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"</s>": 0, "a": 1, "?": 2}
    for name, model, unknown in [
        ("words", tokenizers.models.WordLevel(words, unk_token="?"), 2),
        ("end", tokenizers.models.WordLevel(words, unk_token="</s>"), None),
        ("bytes", tokenizers.models.BPE(words, []), None),
        ("unigram", tokenizers.models.Unigram([("a", 0.0), ("?", -1.0)], unk_id=1), 1),
    ]:
        tokenizers.Tokenizer(model).save(str(tmp_path / f"{name}.json"))
        assert load_tokenizer(str(tmp_path / f"{name}.json")).unknown == unknown, name
    assert load_tokenizer(str(byte_fallback_model)).unknown == 0
    assert load_tokenizer("byte").unknown is None
