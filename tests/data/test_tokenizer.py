from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megads.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    require_eod,
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


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    for text in ["", "a\r\n\t", *random_texts(50)]:
        assert tokenizer.encode(text) == list(text.encode())
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
