"""`megads-preprocess verify`: is a token file whole?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megads.cli.command import command_parser, guarded, positive
from megads.data.inspection import verify
from megads.data.tokenizer import load_tokenizer

NAME = "megads-preprocess verify"
_EXAMPLES = """\
examples:
  megads-preprocess verify data/docs
  megads-preprocess verify data/docs --tokenizer tokenizer.json
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns its exit status, 1 when anything is wrong with the file."""
    parser = command_parser(
        NAME,
        "Read a token file from end to end and name every problem: sizes and index against each "
        "other, and, if a vocabulary is given, every id against it. Exit status 1 if there is any.",
        _EXAMPLES,
    )
    parser.add_argument("prefix", help="the token file, without .bin/.idx")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--tokenizer", help="the one whose vocabulary must hold every id")
    vocabulary.add_argument(
        "--vocab-size", type=positive, metavar="N", help="what every id must be below"
    )
    options = parser.parse_args(arguments)

    def work() -> int:
        vocab_size = options.vocab_size
        if options.tokenizer:
            vocab_size = load_tokenizer(options.tokenizer).vocab_size
        result = verify(options.prefix, vocab_size)
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

    return guarded(NAME, work)
