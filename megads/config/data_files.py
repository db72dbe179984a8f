"""What the data settings name: texts, token files, a tokenizer. Are the files there? No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megads.config.schema import Config
from megads.errors import DataError

BYTE_VOCABULARY = 257
"""256 bytes and the end-of-document token."""
TEXT_SUFFIXES = (".txt", ".jsonl", ".json", ".txt.gz", ".jsonl.gz", ".json.gz")
DEMO = "demo"


def is_text(path: str) -> bool:
    """Whether an entry of `data.paths` is tokenized first, rather than opened as it is."""
    return path == DEMO or path.endswith(TEXT_SUFFIXES)


def strip_suffix(path: str | os.PathLike[str]) -> str:
    """The prefix of a token file that may have been named by its `.bin` or `.idx`."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def tokenizer_file(spec: str) -> Path:
    """The file a tokenizer other than `byte` is loaded from: `spec`, or the one in that folder.

    Raises DataError if there is none.
    """
    path = Path(spec)
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model")]
        path = next((file for file in found if file.is_file()), path)
    if not path.is_file():
        raise DataError(
            f"data.tokenizer={spec}: no such file; it is byte, or the path of a sentencepiece "
            f".model or a Hugging Face tokenizer.json, or of the folder that holds one"
        )
    if path.suffix not in (".model", ".json"):
        raise DataError(f"data.tokenizer={spec}: expected a file ending in .model or .json")
    return path


def data_problems(config: Config) -> Iterator[str]:
    """What is wrong with the paths, the weights or the tokenizer; no data is read."""
    data = config.data
    if not data.paths:
        yield "data.paths is empty; name token files or texts, or choose data=demo"
    if data.weights is not None and len(data.weights) != len(data.paths):
        yield f"data.weights has {len(data.weights)} entries for {len(data.paths)} data.paths"
    elif data.weights and not any(data.weights):
        yield "data.weights are all 0; at least one must be above"
    for key, paths in (("data.paths", data.paths), ("data.valid_paths", data.valid_paths)):
        for path in paths:
            if not is_text(path):
                yield from _token_files(key, path)
            elif path != DEMO and not Path(path).is_file():
                yield f"{key}: {path}: there is no such file"
    if any(map(is_text, (*data.paths, *data.valid_paths))):
        yield from _tokenizer(config)


def _tokenizer(config: Config) -> Iterator[str]:
    if config.data.tokenizer != "byte":
        try:
            tokenizer_file(config.data.tokenizer)
        except DataError as error:
            yield from error.problems
    elif config.model.vocab_size < BYTE_VOCABULARY:
        yield (
            f"model.vocab_size={config.model.vocab_size} is less than the {BYTE_VOCABULARY} "
            f"ids of data.tokenizer=byte"
        )


def _token_files(key: str, path: str) -> Iterator[str]:
    prefix = strip_suffix(path)
    missing = [f"{prefix}{s}" for s in (".bin", ".idx") if not Path(prefix + s).is_file()]
    if len(missing) == 2:
        yield (
            f"{key}: {path}: neither {missing[0]} with {missing[1]} nor a text "
            f"({', '.join(TEXT_SUFFIXES)})"
        )
    elif missing:
        yield f"{key}: {path}: {missing[0]} is missing beside the other half of the pair"
