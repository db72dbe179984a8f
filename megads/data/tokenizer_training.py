"""A sentencepiece tokenizer trained on one's own text.

The model keeps text as it is: no Unicode normalisation, every space kept, none added in front. So
with byte fallback decoding gives back exactly what was encoded, but for U+2581, sentencepiece's
own sign for a space. Pieces 0, 1 and 2 are `<unk>`, `<s>` and `</s>`; the last ends a document.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megads.data.token_format import sync_and_close
from megads.errors import DataError, MegadsError

ModelType = Literal["bpe", "unigram"]
_MAX_LINE = 4192
"""Bytes; sentencepiece passes over longer ones without a word, so they are cut."""
_MAX_PIECE = _MAX_LINE // 4
"""Characters that are at most so many bytes of UTF-8."""
_THREADS = 16
"""Sums of unigram training depend on it, so it is the same on every machine."""


@dataclass(frozen=True)
class TokenizerRecipe:
    """What a tokenizer is to be like."""

    vocab_size: int
    """Pieces in all, `<unk>`, `<s>`, `</s>` and the 256 bytes of byte fallback included."""
    model_type: ModelType = "bpe"
    byte_fallback: bool = True
    """Write characters without a piece as bytes, rather than as `<unk>`."""
    character_coverage: float = 0.9995
    """Share of the text's characters that get pieces of their own."""


def train_tokenizer(texts: Iterable[str], output: Path, recipe: TokenizerRecipe) -> None:
    """Train on `texts` and write the model to `output`, which appears when it is complete.

    The same texts and recipe give the same bytes. All text is held in memory meanwhile.
    Raises DataError for a name that does not end in .model, and when the text is too little or too
    much for the vocabulary; what reading the texts raises passes through.
    """
    if output.suffix != ".model":
        raise DataError(f"{output}: the name of a sentencepiece model ends in .model")
    model = _train(texts, recipe)
    output.parent.mkdir(parents=True, exist_ok=True)
    pending = output.with_name(f"{output.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with pending.open("wb") as file:
            file.write(model)
            sync_and_close(file)
        os.replace(pending, output)
    finally:
        pending.unlink(missing_ok=True)


def _train(texts: Iterable[str], recipe: TokenizerRecipe) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    source = _Source(texts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(source),
            model_writer=model,
            vocab_size=recipe.vocab_size,
            model_type=recipe.model_type,
            byte_fallback=recipe.byte_fallback,
            character_coverage=recipe.character_coverage,
            max_sentence_length=_MAX_LINE,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if source.failure is not None:
            raise source.failure from None
        if not source.lines:
            raise DataError("cannot train a tokenizer: the inputs hold no text") from error
        reason = re.sub(r"^.*?\) *\] *", "", str(error), flags=re.DOTALL).strip()
        raise DataError(
            f"cannot train a tokenizer of {recipe.vocab_size} pieces: {reason or error}"
        ) from error
    return model.getvalue()


class _Source:
    """Lines for the trainer. It turns any error into one of its own, so ours is kept here."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.lines = 0
        self.failure: MegadsError | OSError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in _cut(text):
                    self.lines += 1
                    yield line
        except (MegadsError, OSError) as error:
            self.failure = error
            raise


def _cut(text: str) -> Iterator[str]:
    """Lines without their ends, the longest ones in pieces that begin at a space where one is."""
    for line in text.split("\n"):
        while len(line) > _MAX_PIECE:
            space = line.rfind(" ", 1, _MAX_PIECE + 1)
            at = space if space > 0 else _MAX_PIECE
            yield line[:at]
            line = line[at:]
        if line:
            yield line
