"""`megads-preprocess inspect`: what a token file holds."""

from __future__ import annotations

from collections.abc import Sequence

from megads.cli.command import command_parser, guarded, natural
from megads.data.indexed import IndexedTokens
from megads.data.inspection import token_facts
from megads.data.tokenizer import Tokenizer, load_tokenizer
from megads.errors import DataError

NAME = "megads-preprocess inspect"
_SHOWN = 64
"""Tokens of a document that are shown."""
_EXAMPLES = """\
examples:
  megads-preprocess inspect data/docs
  megads-preprocess inspect data/docs --tokenizer tokenizer.json --documents 10
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns its exit status."""
    parser = command_parser(
        NAME,
        "Print the size, number type and lengths of a token file, and its first documents.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("prefix", help="the token file, without .bin/.idx")
    add("--documents", type=natural, default=3, metavar="N", help="how many to show (default: 3)")
    add("--tokenizer", help="the one the file was made with, to show text rather than ids")
    options = parser.parse_args(arguments)

    def work() -> int:
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

    return guarded(NAME, work)


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
