from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megads.data
from megads.config.decode import to_yaml
from megads.config.schema import Config
from megads.data.indexed import IndexedTokens, TokenWriter
from megads.data.loader import open_loader
from megads.data.prepare import prepare_data
from megads.data.source import validation_names
from megads.errors import DataError

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = Path(megads.data.__file__).parent / "corpus"


def config(run: Path, *, vocab: int = 257, seq: int = 16, **data: Any) -> Config:
    groups: dict[str, Any] = {name: {} for name in Config.model_fields}
    groups["run"] = {"dir": str(run)}
    groups["train"] = {"seq_length": seq}
    groups["model"] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": vocab,
    }
    return Config.model_validate(groups | {"data": data})


def test_the_shipped_text_is_the_one_that_its_note_describes() -> None:
    text = gzip.decompress((CORPUS / "shakespeare.txt.gz").read_bytes())
    note = (CORPUS / "SOURCE.md").read_text()
    assert hashlib.sha256(text).hexdigest() in note
    assert f"{len(text):,} bytes" in note
    breaks = text.count(b"\f")
    assert f"{breaks + 1} documents" in note
    assert b"To be, or not to be,--that is the question:--" in text
    for word in (b"gutenberg", b"copyright", b"etext"):
        assert word not in text.lower()


@pytest.mark.parametrize("path", ["demo", str(CORPUS / "shakespeare.txt.gz")])
def test_demo(path: str, tmp_path: Path) -> None:
    settings = config(tmp_path, paths=[path])
    data = prepare_data(settings)
    assert data.vocab_size == 257
    file = IndexedTokens(data.train[0])
    assert Path(data.train[0]).parent == tmp_path / "data"
    assert (file.num_documents, file.num_tokens) == (167, 1_058_086 + 1)
    train, valid = (open_loader(settings, data, split) for split in ("train", "valid"))  # type: ignore[arg-type]
    share = valid.num_samples / (train.num_samples + valid.num_samples)
    assert 0.01 < share < 0.03


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "one"}\n')
    settings = config(tmp_path / "run", paths=[str(text)])
    first = prepare_data(settings)
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "data").iterdir()}
    assert prepare_data(settings) == first
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "data").iterdir()}
    assert IndexedTokens(first.train[0]).tokens.tolist() == [*b"one", 256]
    text.write_text('{"text": "two, longer"}\n')
    second = prepare_data(settings)
    assert second != first
    assert IndexedTokens(second.train[0]).tokens.tolist() == [*b"two, longer", 256]
    without = prepare_data(config(tmp_path / "run", paths=[str(text)], append_eod=False))
    assert without != second
    # An interrupted attempt leaves no .idx; the next start does it again.
    Path(without.train[0] + ".idx").unlink()
    assert prepare_data(config(tmp_path / "run", paths=[str(text)], append_eod=False)) == without
    assert IndexedTokens(without.train[0]).num_documents == 1


PREPARE = """
import sys
from pathlib import Path
from megads.config.decode import load_config
from megads.data.prepare import prepare_data
print(Path(prepare_data(load_config(sys.argv[1])).train[0] + ".bin").read_bytes() != b"")
"""


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_and_jobs_that_start_at_once(shared: bool, tmp_path: Path) -> None:
    """One tokenizes and the others wait, or each in a directory of its own: the same tokens."""
    text = tmp_path / "text" / "a.txt"
    text.parent.mkdir()
    # Those that wait have to come while it is being tokenized.
    text.write_text("a line of text\n" * (1_000_000 if shared else 1_000))
    runs = [tmp_path / ("run" if shared else f"run{n}") for n in range(3)]
    jobs = []
    for run in runs:
        run.with_suffix(".yaml").write_text(to_yaml(config(run, paths=[str(text)])))
        job = subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(run.with_suffix(".yaml"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        jobs.append(job)
    for job in jobs:
        output, _ = job.communicate(timeout=120)
        assert (job.returncode, output) == (0, "True\n")
    files = [sorted((run / "data").iterdir()) for run in runs]
    assert all([file.suffix for file in found] == [".bin", ".idx"] for found in files)
    assert len({tuple(file.read_bytes() for file in found) for found in files}) == 1
    assert [file.name for file in text.parent.iterdir()] == ["a.txt"], "beside the text: nothing"


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, " * 40)
    settings = config(tmp_path / "run", paths=[str(tmp_path / "a.txt")])
    whole = Path(prepare_data(settings).train[0] + ".bin")
    open_loader(settings, prepare_data(settings), "train").close()
    whole.write_bytes(whole.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{whole}: 960 bytes, .* describes 962 bytes"):
        open_loader(settings, prepare_data(settings), "train")


def test_token_files_are_used_where_they_are(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x.y", "u2") as writer:
        writer.add_document(range(50))
    prefix = str(tmp_path / "x.y")
    for name in (prefix, prefix + ".bin", prefix + ".idx"):
        data = prepare_data(config(tmp_path / "run", paths=[name], valid_paths=[name]))
        assert (data.train, data.valid, data.vocab_size) == ((prefix,), (prefix,), None)
    assert not (tmp_path / "run").exists()
    settings = config(tmp_path / "run", paths=[prefix], valid_paths=[prefix])
    for split in ("train", "valid"):
        assert open_loader(settings, data, split).num_samples == 3  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"valid data: .*x\.y\.bin: 2 tokens"):
        open_loader(
            config(tmp_path / "run", paths=[prefix], valid_fraction=0.04),
            prepare_data(config(tmp_path / "run", paths=[prefix])),
            "valid",
        )


def test_texts_are_read_under_their_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    paths = [str(tmp_path / "a.jsonl")]
    prefixes = []
    for key, text in (("text", b"no"), ("body", b"yes")):
        found = prepare_data(config(tmp_path / "run", paths=paths, text_key=key)).train
        assert list(IndexedTokens(found[0]).tokens) == [*text, 256]
        prefixes += found
    assert prefixes[0] != prefixes[1]
    tokens = config(tmp_path / "run", paths=[prefixes[0]], text_key="body")
    with pytest.raises(DataError, match=r"text_key=body is about texts, and only token files"):
        prepare_data(tokens)


def test_sets_are_called_as_they_are_named_or_as_their_files(tmp_path: Path) -> None:
    (tmp_path / "wiki.en.jsonl").write_text('{"text": "some words"}\n')
    paths = [str(tmp_path / "wiki.en.jsonl"), "demo"]
    named = config(tmp_path / "run", paths=["demo"], valid_paths=paths, valid_names=["one", "two"])
    plain = config(tmp_path / "run", paths=["demo"], valid_paths=paths)
    assert [validation_names(c) for c in (named, plain)] == [("one", "two"), ("wiki", "demo")]
    tokens = config(tmp_path / "run", paths=["/data/x.y.bin", "/data/z_text_document"])
    assert validation_names(tokens) == ("x.y", "z_text_document")


def test_all_problems_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("x")
    settings = config(
        tmp_path,
        paths=["there.txt", str(tmp_path / "there.txt"), "prefix"],
        weights=[1.0],
        valid_paths=["none.jsonl"],
        tokenizer="nowhere/tokenizer.json",
    )
    with pytest.raises(DataError) as caught:
        prepare_data(settings)
    problems = caught.value.problems
    assert len(problems) == 5
    for word in ("data.weights has 1", "paths: there.txt", "prefix.bin", "none.jsonl", "nowhere"):
        assert sum(word in problem for problem in problems) == 1, word
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match=r"data\.paths is empty"):
        prepare_data(config(tmp_path))


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size=256 .*257"):
        prepare_data(config(tmp_path, paths=["demo"], vocab=256))
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(40)} | {"</s>": 40})
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json has 41 ids, model\.vocab_size=40"):
        prepare_data(
            config(tmp_path, paths=["demo"], vocab=40, tokenizer=str(tmp_path / "tokenizer.json"))
        )


def test_an_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        prepare_data(config(tmp_path / "file", paths=["demo"]))


def test_the_tokenizer_is_part_of_the_name(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = set()
    (tmp_path / "a.txt").write_text("w1 w2")
    for count in (3, 4):
        vocabulary = {f"w{i}": i for i in range(count)} | {"</s>": count}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        backend.save(str(tmp_path / "tokenizer.json"))
        settings = config(
            tmp_path, paths=[str(tmp_path / "a.txt")], tokenizer=str(tmp_path / "tokenizer.json")
        )
        [prefix] = prepare_data(settings).train
        names.add(prefix)
        assert IndexedTokens(prefix).tokens.tolist() == [1, 2, count]
        folder = config(tmp_path, paths=[str(tmp_path / "a.txt")], tokenizer=str(tmp_path))
        [prefix] = prepare_data(folder).train
        assert IndexedTokens(prefix).tokens.tolist() == [1, 2, count]
    assert len(names) == 2
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["</s>"] == 4
