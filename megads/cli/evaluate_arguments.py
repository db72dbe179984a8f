"""The words of `megads-eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, natural, new_file, positive
from megads.cli.devices import DTYPES

_EXAMPLES = """\
examples:
  megads-eval runs/mine                                  what the run validates on
  megads-eval runs/mine --data wiki.jsonl code.jsonl     each of two sets, and both together
  megads-eval runs/mine/checkpoints/step-500 --steps 50  an older checkpoint, on more text
  megads-eval runs/mine --tasks hellaswag,arc_easy --num-fewshot 5 --output results.json
  megads-eval runs/mine --tasks my_task --include-path tasks/
"""
_OF_TEXT = ("data", "steps", "config")
_OF_TASKS = ("include_path", "num_fewshot", "limit", "gen_kwargs", "tokenizer", "bos_id")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process, as argparse does, with help or with what is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in _OF_TEXT if options.tasks else _OF_TASKS:
        if getattr(options, name) is not None:
            place = "not for --tasks" if options.tasks else "for --tasks, which is not given"
            parser.error(f"--{name.replace('_', '-')} is {place}")
    if options.run is None and options.tasks != ["list"]:
        parser.error("the following arguments are required: run")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "megads-eval",
        "Measure a trained model: its loss (nats per token) and perplexity on held-out text, or, "
        "with --tasks, its results at tasks of EleutherAI's lm-evaluation-harness.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="run.dir of a training run, or one of its checkpoints")
    size = "samples in a batch (default: the run's; 8 with --tasks)"
    add("--batch", type=positive, metavar="N", help=size)
    add("--dtype", choices=DTYPES, help="compute in this type (default: as saved, fp32 as a rule)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--json", action="store_true", help="print one JSON object")
    add("--output", type=new_file, metavar="FILE", help="write that JSON object to a file as well")
    add = parser.add_argument_group("loss and perplexity on held-out text").add_argument
    sets = "texts or token files, each a set (default: what the run validates on)"
    add("--data", nargs="+", metavar="PATH", help=sets)
    steps = "most batches to read, of all sets together (default: the run's eval.steps)"
    add("--steps", type=positive, metavar="N", help=steps)
    add("--config", type=Path, metavar="FILE", help="config.yaml (default: the one in run.dir)")
    add = parser.add_argument_group("tasks (pip install 'megads[eval]')").add_argument
    names = "names with commas between, * as a wildcard; `list` prints all there are"
    add("--tasks", type=lambda words: words.split(","), metavar="NAMES", help=names)
    add("--include-path", type=Path, metavar="FOLDER", help="more task files (.yaml)")
    shots = "solved examples before each question (default: as the task has it)"
    add("--num-fewshot", type=natural, metavar="N", help=shots)
    first = "only the first N questions of each task, for a try"
    add("--limit", type=positive, metavar="N", help=first)
    settings = "over a task's settings of generation, as in max_gen_toks=32,temperature=0.7"
    add("--gen-kwargs", metavar="SETTINGS", help=settings)
    add("--tokenizer", help="byte or a path (default: the one in the run's config.yaml)")
    before = "id before every text, for models trained with one, as Llama is (default: none)"
    add("--bos-id", type=natural, metavar="ID", help=before)
    return parser
