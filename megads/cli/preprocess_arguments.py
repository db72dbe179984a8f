"""The words of `megads-preprocess`, when it tokenizes."""

from __future__ import annotations

import argparse

from megads.cli.command import command_parser, positive
from megads.data.preprocess import FORM_FEED

TOKENIZERS = (
    "byte, a sentencepiece .model, a Hugging Face tokenizer.json, a .tiktoken file, or "
    "tiktoken:NAME"
)
_EPILOG = """\
examples:
  megads-preprocess --input docs.jsonl --output data/docs
  megads-preprocess --input docs.parquet --output data/docs --tokenizer tokenizer.json --workers 8
then
  megads-train data.paths=data/docs data.tokenizer=tokenizer.json model.vocab_size=50257

other uses (each has a --help of its own):
  megads-preprocess merge            several token files into one
  megads-preprocess inspect          what a token file holds
  megads-preprocess verify           check every byte of a token file
  megads-preprocess train-tokenizer  train a sentencepiece model on text
  megads-preprocess audit            prove that a run repeated and lost no sample
"""


def parser() -> argparse.ArgumentParser:
    """The options of tokenizing."""
    parser = command_parser(
        "megads-preprocess",
        "Tokenize texts into a token file: the pair PREFIX.bin and PREFIX.idx that megads-train, "
        "Megatron-LM and Megatron-DeepSpeed read. After an interruption the same command goes on "
        "where it was.",
        _EPILOG,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="TEXT",
        help='.jsonl files, a document a line as in {"text": "..."}, or plain texts, both also '
        ".gz or .zst; .parquet files; folders that the library datasets saved; "
        "hf:NAME[:CONFIG][@SPLIT], fetched from the Hugging Face hub",
    )
    add("--output", required=True, metavar="PREFIX", help="the files to write, without .bin/.idx")
    add("--tokenizer", default="byte", help=f"{TOKENIZERS} (default: byte)")
    add(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key or column of the text in JSON lines and tables (default: text)",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-document id (default: yes)",
    )
    add(
        "--split-on",
        default=FORM_FEED,
        metavar="STRING",
        help="what stands between the documents of a plain text (default: a form feed)",
    )
    add(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="processes that tokenize; the result does not depend on it (default: 1)",
    )
    return parser
