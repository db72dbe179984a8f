"""`megads-convert`: checkpoints of one format in, of another out; `verify` checks one of megads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["verify"]:
        checkpoint = _verify_parser().parse_args(words[1:]).checkpoint
        return guarded("megads-convert verify", lambda: _verify(checkpoint))
    return guarded("megads-convert", lambda: _convert(words))


def _verify(path: Path) -> int:
    from megads.checkpoint.directory import find_checkpoint
    from megads.checkpoint.reader import verify

    checkpoint = find_checkpoint(path)
    manifest = verify(checkpoint)
    size = sum(file.size for file in manifest.files.values())
    print(f"{checkpoint}: step {manifest.step}, {len(manifest.tensors)} tensors, {size} bytes: ok")
    return 0


def _convert(words: Sequence[str]) -> int:
    from megads.cli.convert_arguments import parse
    from megads.convert.formats import open_source
    from megads.convert.report import progress, summary
    from megads.convert.run import check_equal, convert, mapping, open_checked, unfinished
    from megads.train.agreement import compare_logits

    options = parse(words)
    source = open_checked(options.source, options.from_format, options.reading)
    table = mapping(source)
    print(summary(source, table, every=options.table))
    for left in unfinished(options.target):
        print(f"note: {left} is of a conversion that was killed, if none is running; delete it")
    with progress(len(table)) as report:
        convert(source, options.target, options.to, options.writing, report)
    if options.check:
        result = open_source(options.target, options.to)
        count = check_equal(source, result, options.writing)
        print(f"checked: {count} tensors of {options.target} equal those of {source.path}")
        if told := compare_logits(source, result):
            print(told)
    return 0


def _verify_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "megads-convert verify",
        "Read a checkpoint of megads completely and hold every byte against its digests. Exit "
        "status 1, naming the file, if one is not as it was written.",
        "examples:\n  megads-convert verify runs/mine\n"
        "  megads-convert verify runs/mine/checkpoints/step-500\n",
    )
    parser.add_argument("checkpoint", type=Path, help="a step-N directory, or a run (the newest)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
