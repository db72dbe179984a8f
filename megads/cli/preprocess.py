"""`megads-preprocess`: text in, token files out; and what else is done with token files.

Imports are inside functions because every worker loads this module again when it starts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megads.errors import MegadsError

if TYPE_CHECKING:
    from megads.data.preprocess import PreprocessStats

TOOLS = {
    "merge": "megads.cli.preprocess_tools:merge",
    "inspect": "megads.cli.preprocess_tools:inspect",
    "verify": "megads.cli.preprocess_tools:verify",
    "train-tokenizer": "megads.cli.preprocess_tools:train_tokenizer",
    "audit": "megads.cli.audit:main",
}
"""Subcommands, each a function from arguments to an exit status."""
_TOOLS_HELP = """\
other uses (each has a --help of its own):
  megads-preprocess merge            several token files into one
  megads-preprocess inspect          what a token file holds
  megads-preprocess verify           check every byte of a token file
  megads-preprocess train-tokenizer  train a sentencepiece model on text
  megads-preprocess audit            prove that a run repeated and lost no sample
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in TOOLS:
        module, _, function = TOOLS[given[0]].partition(":")
        status: int = getattr(importlib.import_module(module), function)(given[1:])
        return status
    from megads.cli.preprocess_progress import ProgressDisplay
    from megads.data.preprocess import preprocess

    options = _parser().parse_args(given)
    try:
        with ProgressDisplay() as display:
            stats = preprocess(
                options.input,
                options.output,
                options.tokenizer,
                json_key=options.json_key,
                append_eod=options.append_eod,
                split_on=options.split_on,
                workers=options.workers,
                on_progress=display,
            )
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
        return 130
    print(_report(options.output, stats))
    return 0


def _parser() -> argparse.ArgumentParser:
    from megads.data.preprocess import FORM_FEED

    parser = argparse.ArgumentParser(
        prog="megads-preprocess",
        description="Tokenize text into the .bin/.idx pair that megads-train, Megatron-LM and "
        "Megatron-DeepSpeed read. Interrupted, the same command continues.",
        epilog=_TOOLS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help=".jsonl or text files, also .gz or .zst; .parquet files; folders that datasets saved; "
        "hf:NAME[:CONFIG][@SPLIT]",
    )
    add("--output", required=True, help="prefix of the .bin and .idx files to write")
    add(
        "--tokenizer",
        default="byte",
        help="byte, a sentencepiece .model, a Hugging Face tokenizer.json, a .tiktoken file, or "
        "tiktoken:NAME (default: byte)",
    )
    add(
        "--json-key",
        default="text",
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
        help="string between documents of a text file (default: a form feed)",
    )
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    return parser


def _report(prefix: str, stats: PreprocessStats) -> str:
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
