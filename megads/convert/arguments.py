"""What the words of `megads-convert` ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from megads.convert.formats import FORMATS
from megads.convert.source import ReadOptions, WriteOptions

FILE_MB = 5120
"""Largest file that is written, in MiB, where the user does not say."""
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


def understood(given: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> Arguments:
    """From the parsed words; `refuse` is called with what does not go together."""
    if (given.tp, given.pp) != (1, 1) and given.to != "megatron-lm":
        refuse(f"--tp and --pp cut the files of --to megatron-lm; {given.to} has no such cut")
    target = FORMATS[given.to]
    if given.max_file_mb is not None and not target.free_files:
        refuse(f"--max-file-mb: the sizes of the files of --to {given.to} are its own")
    if given.keep_padding and given.vocab_size is not None:
        refuse("--vocab-size cuts off the padded rows that --keep-padding keeps; choose one")
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
            (given.max_file_mb or FILE_MB) << 20,
        ),
        given.table,
        given.check,
    )
