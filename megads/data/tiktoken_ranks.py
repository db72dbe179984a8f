"""tiktoken's encodings: byte-pair ranks, a pattern that splits the text, and special tokens.

A `.tiktoken` file holds only the ranks, a line `BASE64 RANK` each. The rest comes from a file of
the same name with `.json` after it, if there is one,

    {"pat_str": "...", "special_tokens": {"<|endoftext|>": 100257}}

and otherwise is this: the pattern of cl100k_base (Llama 3 has the same), and one special token,
`<|endoftext|>`, with the first id after the ranks. Published encodings are better loaded by name,
`tiktoken:cl100k_base`, which takes everything from the library; it fetches the ranks once, so it
needs network or a filled TIKTOKEN_CACHE_DIR. Special tokens inside a text are read as plain text.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megads.config.tokenizer_files import (
    END_OF_DOCUMENT_PIECES,
    TIKTOKEN,
    tokenizer_companions,
)
from megads.data.packing import Ids, packed
from megads.errors import DataError
from megads.extras import load_extra

CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_log = logging.getLogger(__name__)


class TiktokenTokenizer:
    """An encoding of the tiktoken library, a `tiktoken.Encoding`."""

    unknown: int | None = None

    def __init__(self, name: str, encoding: Any) -> None:
        self.name = name
        self._encoding = encoding
        self.vocab_size: int = encoding.n_vocab
        specials = encoding.special_tokens_set
        end = next((piece for piece in END_OF_DOCUMENT_PIECES if piece in specials), None)
        self.eod: int | None = None if end is None else encoding.encode_single_token(end)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [packed(self._encoding.encode_ordinary(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # A few ids between the pieces and the special tokens stand for nothing.
        text: str = self._encoding.decode([int(i) for i in ids if self._is_token(int(i))])
        return text

    def _is_token(self, number: int) -> bool:
        try:
            self._encoding.decode_single_token_bytes(number)
        except KeyError:
            return False
        return True


def load_encoding(spec: str) -> TiktokenTokenizer:
    """`tiktoken:NAME`. Raises DataError for a name that is not known or cannot be fetched."""
    name = spec.removeprefix(TIKTOKEN)
    tiktoken = load_extra("tiktoken", f"tokenizer {spec}")
    if name not in (known := tiktoken.list_encoding_names()):
        raise DataError(f"tokenizer {spec}: tiktoken knows {', '.join(sorted(known))}")
    try:
        return TiktokenTokenizer(spec, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # what `requests` raises is an OSError
        raise DataError(
            f"tokenizer {spec}: cannot be fetched ({error}); where there is no network, set "
            f"TIKTOKEN_CACHE_DIR to a folder filled elsewhere, or name a .tiktoken file"
        ) from error


def load_ranks(path: Path) -> TiktokenTokenizer:
    """A `.tiktoken` file. Raises DataError naming it, or the .json beside it, when damaged."""
    tiktoken = load_extra("tiktoken", f"tokenizer {path}")
    ranks = _read_ranks(path)
    pattern, specials = CL100K_PATTERN, {"<|endoftext|>": max(ranks.values()) + 1}
    beside = tokenizer_companions(path)[1:]
    if beside:
        try:
            told = json.loads(beside[0].read_text(encoding="utf-8"))
            pattern, specials = str(told["pat_str"]), dict(told["special_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{beside[0]}: expected an object with pat_str and special_tokens ({error!r})"
            ) from error
    else:
        _log.info("%s: pattern of cl100k_base, special tokens %s", path, specials)
    try:
        encoding = tiktoken.Encoding(
            path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
        )
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not usable as ranks ({error})") from error
    return TiktokenTokenizer(str(path), encoding)


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}, line {number}: expected a token in base 64 and its rank, found "
                f"{line[:40]!r}"
            ) from error
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise DataError(f"{path}: {missing} of the 256 single bytes have no rank")
    if len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise DataError(f"{path}: ranks must differ and be 0 or more")
    return ranks
