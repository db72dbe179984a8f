"""How many words the vocabulary of a checkpoint of Megatron-LM has, if anything says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megads.errors import CheckpointError


def words_of(folder: Path, args: Mapping[str, Any]) -> int | None:
    """What the arguments say, or a tokenizer beside the weights."""
    return _of_args(args) or _of_tokenizer(folder / "tokenizer")


def _of_args(args: Mapping[str, Any]) -> int | None:
    size = args.get("vocab_size")
    if not isinstance(size, int):
        return None
    # This tokenizer's end-of-document id comes after the words that are counted.
    return size + 1 if args.get("tokenizer_type") == "NullTokenizer" else size


def _of_tokenizer(folder: Path) -> int | None:
    """Ids of the tokenizer that Megatron-LM put beside the weights."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        words = content["model"]["vocab"]
        last = max(words.values()) if isinstance(words, dict) else len(words) - 1
        return 1 + max(last, *(int(token["id"]) for token in content["added_tokens"]), last)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from None
