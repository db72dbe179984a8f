"""`megads-convert`: checkpoints of one format in, of another out; `verify` checks one of megads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.errors import MegadsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["verify"]:
            _verify(_verify_parser().parse_args(words[1:]).checkpoint)
        else:
            _convert(_parser().parse_args(words))
    except MegadsError as error:
        print(f"megads-convert: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _verify(path: Path) -> None:
    from megads.checkpoint.directory import find_checkpoint
    from megads.checkpoint.reader import verify

    checkpoint = find_checkpoint(path)
    manifest = verify(checkpoint)
    size = sum(file.size for file in manifest.files.values())
    print(f"{checkpoint}: step {manifest.step}, {len(manifest.tensors)} tensors, {size} bytes: ok")


def _convert(options: argparse.Namespace) -> None:
    import torch

    from megads.convert.formats import open_source
    from megads.convert.report import progress, summary
    from megads.convert.run import check_equal, convert, mapping, open_checked
    from megads.convert.source import ReadOptions, WriteOptions

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    reading = ReadOptions(
        options.step, options.qkv, options.keep_padding, options.vocab_size
    )
    writing = WriteOptions(
        dtypes[options.dtype],
        not options.drop_optimizer,
        options.tp,
        options.pp,
        options.max_file_mb << 20,
    )
    source = open_checked(options.source, options.from_format, reading)
    table = mapping(source)
    print(summary(source, table, every=options.table))
    with progress(len(table)) as report:
        convert(source, options.target, options.to, writing, report)
    if options.check:
        count = check_equal(source, open_source(options.target, options.to), writing)
        print(f"checked: {count} tensors of {options.target} equal those of {source.path}")


def _verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-convert verify",
        description="Read a checkpoint of megads completely and hold every byte against its "
        "digests.",
    )
    parser.add_argument("checkpoint", type=Path, help="a step-N directory, or a run (the newest)")
    return parser


def _parser() -> argparse.ArgumentParser:
    from megads.convert.formats import FORMATS
    from megads.convert.run import writable

    parser = argparse.ArgumentParser(
        prog="megads-convert",
        description="Convert a checkpoint, tensor by tensor. `megads-convert verify CHECKPOINT` "
        "checks one of megads.",
    )
    add = parser.add_argument
    add("source", type=Path, help="directory of the checkpoint, or a run (its newest)")
    add("target", type=Path, help="new directory for the result")
    add("--to", required=True, choices=writable(), help="format of the result")
    add("--from", dest="from_format", default="auto", choices=["auto", *FORMATS])
    add("--step", type=int, help="iteration to take (default: the latest)")
    add("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights (default: as they are)")
    add("--drop-optimizer", action="store_true", help="weights only")
    add("--tp", type=int, default=1, help="tensor-parallel size of the result's files")
    add("--pp", type=int, default=1, help="pipeline-parallel size of the result's files")
    add("--max-file-mb", type=int, default=5120, help="largest file (default: 5120)")
    add("--qkv", default="auto", choices=["auto", "grouped", "thirds"])
    add("--keep-padding", action="store_true", help="take padded rows of the vocabulary as words")
    add("--vocab-size", type=int, help="words, for files that only know the padded number")
    add("--table", action="store_true", help="list every tensor, not a block's only once")
    add("--check", action="store_true", help="read the result back and compare every bit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
