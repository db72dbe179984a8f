"""Text to token ids and back, through one small interface.

No tokenizer adds ids of its own at the ends of a text: what ends a document is decided once, where
documents are written, with the tokenizer's `eod`. None uses threads: what runs in parallel is
decided by who calls it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megads.config.tokenizer_files import (
    BYTE_VOCABULARY,
    END_OF_DOCUMENT_PIECES,
    TIKTOKEN,
    has_tokenizer_file,
    tokenizer_companions,
    tokenizer_file,
)
from megads.data.packing import Ids, packed
from megads.data.tiktoken_ranks import load_encoding, load_ranks
from megads.errors import DataError


class Tokenizer(Protocol):
    """What megads needs of a tokenizer.

    `name` is for messages. `vocab_size` is the largest id that can occur plus one, added tokens
    included. `eod` is the id that ends a document, None when there is none; `unknown` the id that
    stands for what the vocabulary cannot express, None when it can express everything.
    `encode_batch` gives the ids that `encode` gives for each text.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...
    @property
    def unknown(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def may_fill(ids: int, vocab_size: int) -> bool:
    """Whether a tokenizer of so many ids may be that of a model: what is left of its vocabulary,
    a tenth at most, is padding."""
    return ids >= 0.9 * vocab_size


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    name = "byte"
    vocab_size = BYTE_VOCABULARY
    eod: int | None = BYTE_VOCABULARY - 1
    unknown: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

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
            raise DataError(
                f"{path}: not a sentencepiece model ({error}); a file of tiktoken ranks must be "
                f"named .tiktoken"
            ) from error
        self.vocab_size: int = self._model.GetPieceSize()
        end: int = self._model.eos_id()
        self.eod = end if end >= 0 else None
        self.unknown: int | None = self._model.unk_id()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.EncodeAsIds(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if hasattr(self._model, "EncodeAsNumpy"):  # of newer versions
            return [self._model.EncodeAsNumpy(text) for text in texts]
        return [packed(ids) for ids in self._model.Encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.DecodeIds([int(i) for i in ids])
        return text


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    The end of a document is the `eos_token` of the tokenizer_config.json beside it, else the first
    of END_OF_DOCUMENT_PIECES that the vocabulary has. A special token that stands in a text, as
    <|endoftext|> may in one from the web, is read as that token; tiktoken's read it as text.
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
        self.unknown = _unknown_id(self._model.model, vocabulary, self.eod)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        # One by one: the library's own batches start as many threads as there are cores. Results
        # are kept until all are there, because giving memory back each time is slow.
        found = [self._model.encode(text, add_special_tokens=False) for text in texts]
        return [packed(encoding.ids) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


def _unknown_id(model: Any, vocabulary: dict[str, int], eod: int | None) -> int | None:
    if hasattr(model, "nbest_size"):  # Unigram has the id instead of the name, in its state only
        found: int | None = json.loads(model.__getstate__())["unk_id"]
    else:
        found = vocabulary.get(getattr(model, "unk_token", None) or "")
    # GPT-2's files call the end of a document unknown, which byte-level text never is.
    return None if found == eod else found


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
    """The tokenizer that `spec` names.

    `byte`; the path of a sentencepiece `.model`, of a tokenizer.json, of the folder holding one of
    the two, or of a `.tiktoken` file of ranks; or `tiktoken:NAME`, an encoding that the tiktoken
    library knows. Raises DataError naming the path when it does not exist or cannot be read.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec.startswith(TIKTOKEN):
        return load_encoding(spec)
    path = tokenizer_file(spec)
    if path.suffix == ".tiktoken":
        return load_ranks(path)
    return SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)


def tokenizer_identity(spec: str) -> str:
    """What tells one tokenizer from another: its name, and size and date of its files."""
    if not has_tokenizer_file(spec):
        return spec
    return "".join(map(file_identity, tokenizer_companions(tokenizer_file(spec))))


def file_identity(path: Path) -> str:
    """Path, size in bytes and date of change of a file: other content has another identity."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def require_eod(tokenizer: Tokenizer) -> int:
    """The end-of-document id. Raises DataError naming the tokenizer when it has none."""
    if tokenizer.eod is None:
        raise DataError(
            f"tokenizer {tokenizer.name} has no end-of-document token, so it cannot be appended; "
            f"switch append_eod off or use another tokenizer"
        )
    return tokenizer.eod
