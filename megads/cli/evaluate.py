"""`megads-eval`: how good a trained model is, on held-out text or at tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megads.cli.command import guarded
from megads.cli.evaluate_arguments import parse
from megads.cli.evaluate_tasks import tasks

if TYPE_CHECKING:
    from megads.config.schema import Config

_OF_VALIDATION = (
    *("valid_paths", "valid_names", "document_mask"),
    *("tokenizer", "append_eod", "text_key"),
)
"""Settings of `data` that an evaluation of other data than the run's own needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parse(arguments)

    def work() -> int:
        for_programs, for_people = (tasks if options.tasks else _loss)(options)
        print(for_programs if options.json else for_people, flush=True)
        if options.output:
            options.output.write_text(for_programs + "\n", encoding="utf-8")
        return 0

    return guarded("megads-eval", work)


def _loss(options: argparse.Namespace) -> tuple[str, str]:
    """Loss and perplexity on held-out text."""
    from megads.checkpoint.directory import find_checkpoint
    from megads.cli.devices import chosen_device, chosen_dtype
    from megads.config.decode import load_config
    from megads.data.loader import open_loader
    from megads.data.prepare import prepare_data
    from megads.train.evaluate import evaluate_model
    from megads.train.load import load_model
    from megads.train.metrics import perplexity

    device, dtype = chosen_device(options.device), chosen_dtype(options.dtype)
    checkpoint = find_checkpoint(options.run)
    run_dir = checkpoint.parent.parent
    config = _asked_for(load_config(options.config or run_dir / "config.yaml"), run_dir, options)
    loader = open_loader(config, prepare_data(config), "valid", device=device)
    result = evaluate_model(load_model(checkpoint, device=device, dtype=dtype), loader, config)
    loader.close()
    whole = {"all": result.loss} if len(result.by_source) != 1 else {}
    losses = whole | result.by_source
    perplexities = {name: perplexity(loss) for name, loss in losses.items()}
    lines = [f"{checkpoint}, {result.tokens} tokens"]
    for name, loss in losses.items():
        lines.append(f"{name:24} loss {loss:.4f}  perplexity {perplexities[name]:.2f}")
    values = {"tokens": result.tokens, "loss": losses, "perplexity": perplexities}
    return json.dumps(values), "\n".join(lines)


def _asked_for(config: Config, run_dir: Path, options: argparse.Namespace) -> Config:
    """The run's configuration with what the command line says instead."""
    data, train, evaluation = config.data, config.train, config.eval
    if options.data:
        data = data.model_copy(update={"valid_paths": tuple(options.data), "valid_names": ()})
    if data.valid_paths:  # the training data is not read then, and may be gone
        values = {key: getattr(data, key) for key in _OF_VALIDATION}
        data = type(data)(paths=data.valid_paths, **values)
    if options.batch:
        sizes = {"micro_batch_size": options.batch, "global_batch_size": options.batch}
        train = train.model_copy(update=sizes)
    if options.steps:
        evaluation = evaluation.model_copy(update={"steps": options.steps})
    run = config.run.model_copy(update={"dir": str(run_dir)})
    return config.model_copy(update={"data": data, "train": train, "eval": evaluation, "run": run})


if __name__ == "__main__":
    sys.exit(main())
