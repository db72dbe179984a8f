"""`megads-preprocess`: text in, token files out; and what else is done with token files.

Imports are inside functions because every worker loads this module again when it starts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megads.cli.command import INTERRUPTED_STATUS
from megads.config.data_files import strip_suffix
from megads.errors import MegadsError

if TYPE_CHECKING:
    import argparse

    from megads.data.preprocess import PreprocessStats

TOOLS = {
    "merge": "megads.cli.merge_tokens",
    "inspect": "megads.cli.inspect_tokens",
    "verify": "megads.cli.verify_tokens",
    "train-tokenizer": "megads.cli.train_tokenizer",
    "audit": "megads.cli.audit",
}
"""Subcommands, each a module whose `main` makes an exit status of its arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in TOOLS:
        status: int = importlib.import_module(TOOLS[given[0]]).main(given[1:])
        return status
    from megads.cli.preprocess_arguments import parser

    options = parser().parse_args(given)
    try:
        stats = _tokenize(options)
    except MegadsError as error:
        print(f"megads-preprocess: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(
            f"megads-preprocess: cannot write {options.output}: {error.strerror}; what is done is "
            f"kept, the same command continues",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("megads-preprocess: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED_STATUS
    print(_report(options.output, stats))
    return 0


def _tokenize(options: argparse.Namespace) -> PreprocessStats:
    from megads.cli.preprocess_progress import ProgressDisplay
    from megads.data.preprocess import preprocess

    with ProgressDisplay() as display:
        return preprocess(
            options.input,
            options.output,
            options.tokenizer,
            json_key=options.json_key,
            append_eod=options.append_eod,
            split_on=options.split_on,
            workers=options.workers,
            on_progress=display,
        )


def _report(output: str, stats: PreprocessStats) -> str:
    prefix = strip_suffix(output)
    lines = [
        f"wrote      {prefix}.bin, {prefix}.idx",
        f"documents  {stats.documents} (and {stats.empty} empty, left out)",
        f"tokens     {stats.tokens} (longest document {stats.longest}, {stats.unknown} unknown)",
        f"vocabulary {stats.vocab_size}, stored as {stats.dtype}",
        f"read       {stats.input_bytes / 1e6:.1f} MB of text, "
        f"{stats.bytes_per_second / 1e6:.2f} MB/s in {stats.seconds:.1f} s",
    ]
    if stats.bytes_continued:
        lines.append(f"continued  after {stats.bytes_continued / 1e6:.1f} MB of an earlier run")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
