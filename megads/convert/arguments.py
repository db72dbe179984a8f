"""The words of `megads-convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.convert.formats import FORMATS
from megads.convert.run import writable
from megads.convert.source import ReadOptions, WriteOptions

_FILE_MB = 5120
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Arguments:
    """What is to be converted into what. `table`: list every tensor; `check`: compare after."""

    source: Path
    target: Path
    from_format: str
    to: str
    reading: ReadOptions
    writing: WriteOptions
    table: bool
    check: bool


def parse(words: Sequence[str]) -> Arguments:
    """Ends the process, as argparse does, with help or with what is wrong."""
    parser = _parser()
    given = parser.parse_args(words)
    if (given.tp, given.pp) != (1, 1) and given.to != "megatron-lm":
        parser.error(f"--tp and --pp cut the files of --to megatron-lm; {given.to} has no such cut")
    target = FORMATS[given.to]
    if given.max_file_mb is not None and not target.free_files:
        parser.error(f"--max-file-mb: the sizes of the files of --to {given.to} are its own")
    if given.keep_padding and given.vocab_size is not None:
        parser.error("--vocab-size cuts off the padded rows that --keep-padding keeps; choose one")
    optimizer = target.moments and not given.drop_optimizer
    return Arguments(
        given.source,
        given.target,
        given.from_format,
        given.to,
        ReadOptions(given.step, given.qkv, given.keep_padding, given.vocab_size, optimizer),
        WriteOptions(
            DTYPES.get(given.dtype),
            not given.drop_optimizer,
            given.tp,
            given.pp,
            (given.max_file_mb or _FILE_MB) << 20,
        ),
        given.table,
        given.check,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-convert",
        description="Convert a checkpoint, tensor by tensor. `megads-convert verify CHECKPOINT` "
        "checks one of megads.",
    )
    add = parser.add_argument
    add("source", type=Path, help="directory of the checkpoint, or a run (its newest)")
    add("target", type=Path, help="new directory for the result")
    add("--to", required=True, choices=writable(), help="format of the result")
    add(
        "--from",
        dest="from_format",
        default="auto",
        choices=["auto", *FORMATS],
        help="format of the source (default: found out from the files)",
    )
    add("--step", type=int, help="iteration to take (default: the latest)")
    add("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    add("--drop-optimizer", action="store_true", help="weights only")
    add("--tp", type=_positive, default=1, help="tensor-parallel size of the result's files")
    add("--pp", type=_positive, default=1, help="pipeline-parallel size of the result's files")
    add("--max-file-mb", type=_positive, help=f"largest file (default: {_FILE_MB})")
    add(
        "--qkv",
        default="auto",
        choices=["auto", "grouped", "thirds"],
        help="order of fused query, key and value rows, where neither files nor shapes tell: per "
        "KV head, or all queries, all keys, all values of a rank (default: as the writing "
        "software's newest version has it; what was taken is said)",
    )
    add("--keep-padding", action="store_true", help="take padded rows of the vocabulary as words")
    add("--vocab-size", type=_positive, help="words, for files that only know the padded number")
    add("--table", action="store_true", help="list every tensor, not a block's only once")
    add("--check", action="store_true", help="compare the result bit by bit, and logits")
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number
