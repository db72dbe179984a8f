"""`megads-preprocess merge | inspect | verify | train-tokenizer`: what is done with token files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megads.config.data_files import strip_suffix
from megads.data.indexed import IndexedTokens
from megads.data.inputs import open_input
from megads.data.inspection import token_facts
from megads.data.inspection import verify as verify_tokens
from megads.data.merge import merge as merge_tokens
from megads.data.tokenizer import Tokenizer, load_tokenizer
from megads.data.tokenizer_training import TokenizerRecipe
from megads.data.tokenizer_training import train_tokenizer as train_model
from megads.errors import DataError, MegadsError

_SHOWN = 64
"""Tokens of a document that `inspect` shows."""
_PAGE_BREAK = "\f"


def merge(arguments: Sequence[str]) -> int:
    """Several token files into one; returns the exit status."""
    parser = _parser("merge", "Write the documents of several token files into one, in order.")
    parser.add_argument("--input", nargs="+", required=True, help="prefixes of .bin/.idx pairs")
    parser.add_argument("--output", required=True, help="prefix of the pair to write")
    options = parser.parse_args(arguments)

    def run() -> int:
        stats = merge_tokens(options.input, options.output)
        prefix = strip_suffix(options.output)
        print(f"wrote      {prefix}.bin, {prefix}.idx")
        print(f"documents  {stats.documents} ({stats.sequences} sequences)")
        print(f"tokens     {stats.tokens}, stored as {stats.dtype}")
        for narrow in stats.widened:
            print(f"widened    {narrow} to {stats.dtype}, which holds the ids of all inputs")
        return 0

    return _guarded("merge", run)


def inspect(arguments: Sequence[str]) -> int:
    """What a token file holds; returns the exit status."""
    parser = _parser("inspect", "Print what a token file holds, and some of its documents.")
    parser.add_argument("prefix", help="prefix of a .bin/.idx pair")
    parser.add_argument("--documents", type=int, default=3, help="how many to show (default: 3)")
    parser.add_argument("--tokenizer", help="to show text rather than ids")
    options = parser.parse_args(arguments)

    def run() -> int:
        file = IndexedTokens(options.prefix)
        tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
        facts = token_facts(file)
        print(f"file       {file.bin_path}, {file.idx_path.name}")
        print(f"documents  {facts.documents} ({facts.sequences} sequences, {facts.empty} empty)")
        print(f"tokens     {facts.tokens}, stored as {facts.dtype}")
        print(f"length     {facts.shortest} to {facts.longest} tokens a document")
        print(f"size       {facts.bin_bytes} and {facts.idx_bytes} bytes")
        for number in range(min(options.documents, facts.documents)):
            print(_shown(file, number, tokenizer))
        return 0

    return _guarded("inspect", run)


def _shown(file: IndexedTokens, number: int, tokenizer: Tokenizer | None) -> str:
    ids = file.document(number)
    first = ids[:_SHOWN].tolist()
    if tokenizer is None:
        shown = " ".join(map(str, first))
    elif outside := [i for i in first if not 0 <= i < tokenizer.vocab_size]:
        raise DataError(
            f"{file.bin_path}: document {number} holds id {outside[0]}, but tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size} ids; the file was made with another one"
        )
    else:
        shown = repr(tokenizer.decode(first))
    return f"document {number}, {len(ids)} tokens: {shown}{' ...' if len(ids) > _SHOWN else ''}"


def verify(arguments: Sequence[str]) -> int:
    """Read all of a token file; returns the exit status, 1 when anything is wrong with it."""
    parser = _parser("verify", "Read a token file from end to end and name every problem.")
    parser.add_argument("prefix", help="prefix of a .bin/.idx pair")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--tokenizer", help="whose vocabulary must hold every id")
    vocabulary.add_argument("--vocab-size", type=int, help="every id must be below this")
    options = parser.parse_args(arguments)

    def run() -> int:
        vocab_size = options.vocab_size
        if options.tokenizer:
            vocab_size = load_tokenizer(options.tokenizer).vocab_size
        result = verify_tokens(options.prefix, vocab_size)
        for problem in result.problems:
            print(problem, file=sys.stderr)
        if result.problems:
            return 1
        ids = f"ids up to {result.largest_id}" if result.tokens else "no ids"
        print(
            f"{options.prefix}: {result.documents} documents, {result.tokens} tokens, {ids}: "
            f"nothing is wrong"
        )
        return 0

    return _guarded("verify", run)


def train_tokenizer(arguments: Sequence[str]) -> int:
    """A sentencepiece model from text; returns the exit status."""
    parser = _parser("train-tokenizer", "Train a sentencepiece tokenizer on text.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="texts, as megads-preprocess reads")
    add("--output", type=Path, required=True, help="the .model file to write")
    add("--vocab-size", type=int, required=True, help="pieces, special ones and bytes included")
    add("--model-type", choices=("bpe", "unigram"), default=TokenizerRecipe.model_type)
    add(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=TokenizerRecipe.byte_fallback,
        help="write characters without a piece as bytes (default: yes)",
    )
    add(
        "--character-coverage",
        type=float,
        default=TokenizerRecipe.character_coverage,
        help="share of the text's characters that get a piece (default: %(default)s)",
    )
    add("--json-key", default="text", help="key of the text in each JSON line (default: text)")
    options = parser.parse_args(arguments)

    def run() -> int:
        recipe = TokenizerRecipe(
            options.vocab_size,
            options.model_type,
            options.byte_fallback,
            options.character_coverage,
        )
        inputs = [open_input(spec, options.json_key, _PAGE_BREAK) for spec in options.input]
        chunks = (chunk for source in inputs for chunk in source.chunks())
        texts = (text for chunk in chunks for text in chunk.texts())
        train_model(texts, options.output, recipe)
        print(f"wrote      {options.output} ({options.vocab_size} pieces)")
        return 0

    return _guarded("train-tokenizer", run)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"megads-preprocess {name}", description=description)


def _guarded(name: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except MegadsError as error:
        print(f"megads-preprocess {name}: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"megads-preprocess {name}: {error}", file=sys.stderr)
        return 1
