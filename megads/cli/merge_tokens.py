"""`megads-preprocess merge`: several token files into one."""

from __future__ import annotations

from collections.abc import Sequence

from megads.cli.command import command_parser, guarded
from megads.config.data_files import strip_suffix
from megads.data.merge import merge

NAME = "megads-preprocess merge"
_EXAMPLES = """\
examples:
  megads-preprocess merge --input data/part-1 data/part-2 --output data/all

To train on several files in given shares, they need not be merged:
  megads-train data.paths=[data/part-1,data/part-2] data.weights=[0.7,0.3]
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns its exit status."""
    parser = command_parser(
        NAME,
        "Write the documents of several token files into one, in the order given. All must have "
        "been made with the same tokenizer.",
        _EXAMPLES,
    )
    prefixes = "the token files to read, without .bin/.idx"
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help=prefixes)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the one to write")
    options = parser.parse_args(arguments)

    def work() -> int:
        stats = merge(options.input, options.output)
        prefix = strip_suffix(options.output)
        print(f"wrote      {prefix}.bin, {prefix}.idx")
        print(f"documents  {stats.documents} ({stats.sequences} sequences)")
        print(f"tokens     {stats.tokens}, stored as {stats.dtype}")
        for narrow in stats.widened:
            print(f"widened    {narrow} to {stats.dtype}, which holds the ids of all inputs")
        return 0

    return guarded(NAME, work)
