"""Are the files there that the data settings name?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megads.config.schema import Config

BYTE_VOCABULARY = 257
"""256 bytes and the end-of-document token."""
TEXT_SUFFIXES = (".txt", ".jsonl", ".json", ".txt.gz", ".jsonl.gz", ".json.gz")
DEMO = "demo"


def data_problems(config: Config) -> Iterator[str]:
    """What is wrong with the paths, the weights or the tokenizer; no data is read."""
    data = config.data
    if not data.paths:
        yield "data.paths is empty; name token files or texts, or choose data=demo"
    if data.weights is not None and len(data.weights) != len(data.paths):
        yield f"data.weights has {len(data.weights)} entries for {len(data.paths)} data.paths"
    elif data.weights and not any(data.weights):
        yield "data.weights are all 0; at least one must be above"
    texts = False
    for key, paths in (("data.paths", data.paths), ("data.valid_paths", data.valid_paths)):
        for path in paths:
            is_text = path == DEMO or path.endswith(TEXT_SUFFIXES)
            texts = texts or is_text
            if path != DEMO and is_text and not Path(path).is_file():
                yield f"{key}: {path}: there is no such file"
            elif not is_text:
                yield from _token_files(key, path)
    if not texts:
        return
    if data.tokenizer == "byte":
        if config.model.vocab_size < BYTE_VOCABULARY:
            yield (
                f"model.vocab_size={config.model.vocab_size} is less than the {BYTE_VOCABULARY} "
                f"ids of data.tokenizer=byte"
            )
    elif not Path(data.tokenizer).is_file():
        yield (
            f"data.tokenizer={data.tokenizer}: there is no such file; it is byte, or the path of a "
            f"sentencepiece .model or a Hugging Face tokenizer.json"
        )


def _token_files(key: str, path: str) -> Iterator[str]:
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    missing = [f"{prefix}{s}" for s in (".bin", ".idx") if not Path(prefix + s).is_file()]
    if len(missing) == 2:
        yield (
            f"{key}: {path}: neither {missing[0]} with {missing[1]} nor a text "
            f"({', '.join(TEXT_SUFFIXES)})"
        )
    elif missing:
        yield f"{key}: {path}: {missing[0]} is missing beside the other half of the pair"
