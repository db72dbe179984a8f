"""`megads-preprocess`: text in, token files out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.data.preprocess import FORM_FEED, PreprocessStats, preprocess
from megads.errors import MegadsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        stats = preprocess(
            options.input,
            options.output,
            options.tokenizer,
            json_key=options.json_key,
            append_eod=options.append_eod,
            split_on=options.split_on,
            workers=options.workers,
        )
    except MegadsError as error:
        print(f"megads-preprocess: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"megads-preprocess: {error}", file=sys.stderr)
        return 1
    print(_report(options.output, stats))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-preprocess",
        description="Tokenize text into the .bin/.idx pair that megads-train, Megatron-LM and "
        "Megatron-DeepSpeed read.",
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, help=".jsonl or text files, also .gz")
    add("--output", required=True, help="prefix of the .bin and .idx files to write")
    add(
        "--tokenizer",
        default="byte",
        help="byte, a sentencepiece .model, or a Hugging Face tokenizer.json (default: byte)",
    )
    add("--json-key", default="text", help="key of the text in each JSON line (default: text)")
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-document id (default: yes)",
    )
    add(
        "--split-on",
        default=FORM_FEED,
        help="string between documents of a text file (default: a form feed)",
    )
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    return parser


def _report(prefix: str, stats: PreprocessStats) -> str:
    return "\n".join(
        [
            f"wrote      {prefix}.bin, {prefix}.idx",
            f"documents  {stats.documents} (and {stats.empty} empty, left out)",
            f"tokens     {stats.tokens} (longest document {stats.longest})",
            f"vocabulary {stats.vocab_size}, stored as {stats.dtype}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
