"""The words of `megads-eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megads.cli.arguments import positive
from megads.cli.devices import DTYPES

_EXAMPLES = """\
examples:
  megads-eval runs/mine                                  what the run validates on
  megads-eval runs/mine --data wiki.jsonl code.jsonl     each set, and all together
  megads-eval runs/mine/checkpoints/step-500 --steps 50  an older checkpoint, more text
  megads-eval runs/mine --tasks hellaswag,arc_easy --num-fewshot 5 --output results.json
  megads-eval runs/mine --tasks my_task --include-path tasks/    my_task.yaml in tasks/
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
    if options.output and not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.parent}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-eval",
        description="Measure a trained model: its loss and perplexity on held-out text, or, with "
        "--tasks, its results at tasks of EleutherAI's lm-evaluation-harness.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="run.dir of a training run, or one of its checkpoints")
    add("--batch", type=positive, help="samples in a batch (default: the run's; 8 with --tasks)")
    add("--dtype", choices=DTYPES, help="compute in this type (default: as saved, fp32 as a rule)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--json", action="store_true", help="print one JSON object")
    add("--output", type=Path, help="a file to write that JSON object to as well")
    add = parser.add_argument_group("loss and perplexity on held-out text").add_argument
    add(
        "--data",
        nargs="+",
        help="texts or prefixes of token files (default: what the run validates on: "
        "data.valid_paths, or the last data.valid_fraction of its data)",
    )
    add("--steps", type=positive, help="most batches to read (default: the run's eval.steps)")
    add("--config", type=Path, help="a config.yaml (default: the one in run.dir)")
    add = parser.add_argument_group("tasks (pip install 'megads[eval]')").add_argument
    add(
        "--tasks",
        type=lambda words: words.split(","),
        help="names with commas between, * as a wildcard; `list` prints all there are",
    )
    add("--include-path", type=Path, help="folder with more task files (.yaml)")
    add(
        "--num-fewshot",
        type=int,
        help="solved examples before each question (default: as the task)",
    )
    add("--limit", type=positive, help="only the first so many questions of each task")
    add("--gen-kwargs", help="over a task's generation settings: max_gen_toks=32,temperature=0.7")
    add("--tokenizer", help="byte or a path (default: the one in the run's config.yaml)")
    add("--bos-id", type=int, help="id before every text, for models trained so (default: none)")
    return parser
