"""`megads-preprocess train-tokenizer`: a sentencepiece model from text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, guarded, positive
from megads.data.inputs import open_input
from megads.data.preprocess import FORM_FEED
from megads.data.tokenizer_training import TokenizerRecipe, train_tokenizer

NAME = "megads-preprocess train-tokenizer"
_EXAMPLES = """\
examples:
  megads-preprocess train-tokenizer --input docs.jsonl --output tok.model --vocab-size 8000
then
  megads-preprocess --input docs.jsonl --output data/docs --tokenizer tok.model
  megads-train data.paths=data/docs data.tokenizer=tok.model model.vocab_size=8000
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns its exit status."""
    options = _parser().parse_args(arguments)

    def work() -> int:
        recipe = TokenizerRecipe(
            options.vocab_size,
            options.model_type,
            options.byte_fallback,
            options.character_coverage,
        )
        inputs = [open_input(spec, options.json_key, FORM_FEED) for spec in options.input]
        chunks = (chunk for source in inputs for chunk in source.chunks())
        texts = (text for chunk in chunks for text in chunk.texts())
        train_tokenizer(texts, options.output, recipe)
        print(f"wrote      {options.output} ({options.vocab_size} pieces)")
        return 0

    return guarded(NAME, work)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        NAME, "Train a sentencepiece tokenizer on text, all of which is held in memory.", _EXAMPLES
    )
    add = parser.add_argument
    texts = "what megads-preprocess reads: .jsonl, plain texts, .gz, .zst, .parquet, ..."
    add("--input", nargs="+", required=True, metavar="TEXT", help=texts)
    add("--output", type=Path, required=True, metavar="FILE", help="the .model file to write")
    add(
        "--vocab-size",
        type=positive,
        required=True,
        metavar="N",
        help="pieces in all: 3 special ones and, with --byte-fallback, 256 bytes included",
    )
    kinds = "how pieces are found, as sentencepiece calls it (default: %(default)s)"
    add("--model-type", choices=("bpe", "unigram"), default=TokenizerRecipe.model_type, help=kinds)
    add(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=TokenizerRecipe.byte_fallback,
        help="write characters without a piece as bytes, not as unknown (default: yes)",
    )
    add(
        "--character-coverage",
        type=float,
        default=TokenizerRecipe.character_coverage,
        metavar="SHARE",
        help="share of the text's characters that get a piece (default: %(default)s)",
    )
    key = "key or column of the text in JSON lines and tables (default: text)"
    add("--json-key", default="text", metavar="KEY", help=key)
    return parser
