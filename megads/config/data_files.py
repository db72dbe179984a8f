"""What the data settings name: texts, token files, a tokenizer. Are the files there? No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megads.config.schema import Config, DataConfig
from megads.config.streams import is_streamed, source_problems
from megads.config.tokenizer_files import BYTE_VOCABULARY, has_tokenizer_file, tokenizer_file
from megads.errors import DataError

TEXT_SUFFIXES = (
    *(kind + packing for packing in ("", ".gz", ".zst") for kind in (".txt", ".jsonl", ".json")),
    ".parquet",
)
DEMO = "demo"


def is_text(path: str) -> bool:
    """Whether an entry of `data.paths` is tokenized first, rather than opened as it is."""
    return path == DEMO or path.endswith(TEXT_SUFFIXES)


def strip_suffix(path: str | os.PathLike[str]) -> str:
    """The prefix of a token file that may have been named by its `.bin` or `.idx`."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def source_name(path: str) -> str:
    """What an entry of `data.paths` is called: its file's name without what follows."""
    return Path(path).name.split(".")[0] if is_text(path) else Path(strip_suffix(path)).name


def data_problems(config: Config) -> Iterator[str]:
    """What is wrong with the paths, the weights or the tokenizer; no data is read."""
    data = config.data
    if not data.paths:
        yield "data.paths is empty; name token files or texts, or choose data=demo"
    streamed = is_streamed(config)
    if streamed:
        yield from source_problems(config, TEXT_SUFFIXES)
    elif data.weights is not None and len(data.weights) != len(data.paths):
        yield f"data.weights has {len(data.weights)} entries for {len(data.paths)} data.paths"
    elif data.weights and not any(data.weights):
        yield "data.weights are all 0; at least one must be above"
    valid = "data.valid_paths" if data.valid_paths else "data.paths"
    sets = len(data.valid_paths or data.paths)
    if data.valid_names and len(data.valid_names) != sets:
        yield f"data.valid_names has {len(data.valid_names)} names for {sets} {valid}"
    share = data.valid_fraction
    if data.valid_paths and share != DataConfig.model_fields["valid_fraction"].default:
        yield f"data.valid_fraction={share} is only read without data.valid_paths"
    if len(set(data.valid_names)) < len(data.valid_names) or "all" in data.valid_names:
        yield (
            f"data.valid_names={list(data.valid_names)}: each set needs a name of its own, and "
            f"`all` means all together"
        )
    files = () if streamed else data.paths
    for key, paths in (("data.paths", files), ("data.valid_paths", data.valid_paths)):
        for path in paths:
            if not is_text(path):
                yield from _token_files(key, path)
            elif path != DEMO and not Path(path).is_file():
                yield f"{key}: {path}: there is no such file"
    if streamed or any(map(is_text, (*files, *data.valid_paths))):
        yield from _tokenizer(config)
    elif data.text_key != DataConfig.model_fields["text_key"].default:
        yield f"data.text_key={data.text_key} is about texts, and only token files are read"


def _tokenizer(config: Config) -> Iterator[str]:
    if has_tokenizer_file(config.data.tokenizer):
        try:
            tokenizer_file(config.data.tokenizer)
        except DataError as error:
            yield from error.problems
    elif config.data.tokenizer == "byte" and config.model.vocab_size < BYTE_VOCABULARY:
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
