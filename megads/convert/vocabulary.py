"""How many rows of a padded vocabulary are words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megads.convert.source import ReadOptions
from megads.errors import CheckpointError


@dataclass(frozen=True)
class Vocabulary:
    """How many rows of the embedding are words, and what there is to say about it."""

    size: int
    notes: tuple[str, ...] = ()


def vocabulary(folder: Path, options: ReadOptions, known: int | None, padded: int) -> Vocabulary:
    """Words among `padded` rows; `known` is what the files say.

    Raises CheckpointError if there are not so many rows.
    """
    if options.keep_padding:
        return Vocabulary(padded)
    size = options.vocab_size or known
    if size is None:
        return Vocabulary(
            padded,
            (
                f"the files only know the padded vocabulary, all {padded} rows are taken as words "
                f"(--vocab-size says how many there are)",
            ),
        )
    if not 0 < size <= padded:
        raise CheckpointError(f"{folder}: {size} words cannot be in {padded} rows of the embedding")
    return Vocabulary(size)
