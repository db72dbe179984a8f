"""The words of `megads-convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, positive
from megads.convert.arguments import DTYPES, FILE_MB, Arguments, understood
from megads.convert.formats import FORMATS
from megads.convert.run import writable

_EPILOG = """\
formats:
  megads              checkpoints of megads-train
  hf                  folders of Hugging Face transformers: config.json and safetensors or .bin
  megatron-lm         Megatron-LM, torch and torch_dist; written as torch, weights only
  megatron-deepspeed  Megatron-DeepSpeed; read only
  gpt-neox            GPT-NeoX; read only

examples:
  megads-convert llama-hf/ llama/ --to megads
then
  megads-train model=llama3-8b checkpoint.load=llama checkpoint.load_what=weights data.paths=docs
  megads-convert runs/mine mine-hf/ --to hf --check          logits equal those of transformers?
  megads-convert megatron-run/ mine/ --to megads --vocab-size 50257
  megads-convert runs/mine mine-megatron/ --to megatron-lm --tp 2 --pp 2

other uses:
  megads-convert verify runs/mine    is every byte of a checkpoint of megads as it was written?
"""


def parse(words: Sequence[str]) -> Arguments:
    """Ends the process, as argparse does, with help or with what is wrong."""
    parser = _parser()
    return understood(parser.parse_args(words), parser.error)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "megads-convert",
        "Convert a checkpoint of one format to another, tensor by tensor. What cannot be "
        "represented is refused, with its name.",
        _EPILOG,
    )
    add = parser.add_argument
    add("source", type=Path, help="directory of the checkpoint, or a run (its newest)")
    add("target", type=Path, help="new directory for the result")
    add("--to", required=True, choices=writable(), help="format of the result")
    source = "format of the source (default: found out from the files)"
    add("--from", dest="from_format", default="auto", choices=["auto", *FORMATS], help=source)
    add("--step", type=int, metavar="N", help="iteration to take (default: the latest)")
    add("--dtype", choices=DTYPES, help="number type of the weights (default: as they are)")
    add("--drop-optimizer", action="store_true", help="weights only, no moments and masters")
    cut = "{} size that the files of --to megatron-lm are for (default: 1)".format
    add("--tp", type=positive, default=1, metavar="N", help=cut("tensor-parallel"))
    add("--pp", type=positive, default=1, metavar="N", help=cut("pipeline-parallel"))
    size = f"largest file in MiB (default: {FILE_MB})"
    add("--max-file-mb", type=positive, metavar="MIB", help=size)
    order = (
        "order of fused query, key and value rows, where neither files nor shapes tell: per KV "
        "head, or all queries, all keys, all values of a rank (default: as the writing software's "
        "newest version has it; what was taken is said)"
    )
    add("--qkv", default="auto", choices=["auto", "grouped", "thirds"], help=order)
    padding = "take the rows that only fill up the vocabulary as words too"
    add("--keep-padding", action="store_true", help=padding)
    words = "words of the vocabulary, for files that only know its padded number"
    add("--vocab-size", type=positive, metavar="N", help=words)
    add("--table", action="store_true", help="list every tensor, not those of one block only")
    check = (
        "compare the result with the source bit by bit and, where transformers is installed, its "
        "logits with those of transformers"
    )
    add("--check", action="store_true", help=check)
    return parser
