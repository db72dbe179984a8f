"""Text to token ids and back, through one small interface.

No tokenizer adds ids of its own at the ends of a text: what ends a document is decided once, where
documents are written, with the tokenizer's `eod`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megads.config.data_files import BYTE_VOCABULARY, tokenizer_file
from megads.errors import DataError

END_OF_DOCUMENT_PIECES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
    "<eod>",
)
"""Names that mark the end of a document, tried in order when tokenizer.json comes without a
tokenizer_config.json to say which of its tokens it is."""


class Tokenizer(Protocol):
    """What megads needs of a tokenizer.

    `name` is for messages. `vocab_size` is the largest id that can occur plus one, added tokens
    included. `eod` is the id that ends a document, None when there is none.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    name = "byte"
    vocab_size = BYTE_VOCABULARY
    eod: int | None = BYTE_VOCABULARY - 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids above 255 have no text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece `.model`; encodes exactly as sentencepiece does, byte fallback included."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.name = str(path)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: not a sentencepiece model ({error})") from error
        self.vocab_size: int = self._model.GetPieceSize()
        end: int = self._model.eos_id()
        self.eod = end if end >= 0 else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.EncodeAsIds(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.DecodeIds([int(i) for i in ids])
        return text


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    The end of a document is the `eos_token` of the tokenizer_config.json beside it, else the first
    of END_OF_DOCUMENT_PIECES that the vocabulary has.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = str(path)
        try:
            self._model = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every bad file
            raise DataError(f"{path}: not a tokenizer.json ({error})") from error
        self._model.no_truncation()
        self._model.no_padding()
        vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        configured = _configured_end(path.with_name("tokenizer_config.json"))
        names = END_OF_DOCUMENT_PIECES if configured is None else (configured,)
        self.eod = next((vocabulary[name] for name in names if name in vocabulary), None)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


def _configured_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    end = settings.get("eos_token")
    return end.get("content") if isinstance(end, dict) else end


def load_tokenizer(spec: str) -> Tokenizer:
    """`byte`, the path of a sentencepiece `.model` or of a tokenizer.json or the folder holding it.

    Raises DataError naming the path when it does not exist or cannot be read.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = tokenizer_file(spec)
    return SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)


def require_eod(tokenizer: Tokenizer) -> int:
    """The end-of-document id. Raises DataError naming the tokenizer when it has none."""
    if tokenizer.eod is None:
        raise DataError(
            f"tokenizer {tokenizer.name} has no end-of-document token, so it cannot be appended; "
            f"switch append_eod off or use another tokenizer"
        )
    return tokenizer.eod
