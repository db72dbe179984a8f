"""`megads-eval`: the loss and perplexity of a trained model on held-out text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megads.errors import MegadsError

if TYPE_CHECKING:
    from megads.config.schema import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except MegadsError as error:
        print(f"megads-eval: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    import torch

    from megads.checkpoint.directory import find_checkpoint
    from megads.config.decode import load_config
    from megads.data.loader import open_loader
    from megads.data.prepare import prepare_data
    from megads.train.evaluate import evaluate_model
    from megads.train.load import load_model

    checkpoint = find_checkpoint(options.run)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run_dir = checkpoint.parent.parent
    config = _asked_for(load_config(options.config or run_dir / "config.yaml"), run_dir, options)
    loader = open_loader(config, prepare_data(config), "valid", device=device)
    result = evaluate_model(load_model(checkpoint, device=device), loader, config)
    loader.close()
    losses = {"all": result.loss} if len(result.by_source) != 1 else {}
    losses |= result.by_source
    if options.json:
        print(json.dumps({"tokens": result.tokens, "loss": losses}))
        return
    print(f"{checkpoint}, {result.tokens} tokens")
    for name, loss in losses.items():
        print(f"{name:24} loss {loss:.4f}  perplexity {math.exp(loss):.2f}")


def _asked_for(config: Config, run_dir: Path, options: argparse.Namespace) -> Config:
    """The run's configuration with what the command line says instead."""
    data, train, evaluation = config.data, config.train, config.eval
    if options.data:
        data = data.model_copy(update={"valid_paths": tuple(options.data)})
    if options.batch:
        sizes = {"micro_batch_size": options.batch, "global_batch_size": options.batch}
        train = train.model_copy(update=sizes)
    if options.steps:
        evaluation = evaluation.model_copy(update={"steps": options.steps})
    run = config.run.model_copy(update={"dir": str(run_dir)})
    return config.model_copy(update={"data": data, "train": train, "eval": evaluation, "run": run})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-eval",
        description="Print the loss and perplexity of a trained model on held-out text.",
    )
    add = parser.add_argument
    add("run", type=Path, help="run.dir of a training run, or one of its checkpoints")
    add(
        "--data",
        nargs="+",
        help="texts or token files (default: what the run validates on: data.valid_paths, or the "
        "last data.valid_fraction of its data)",
    )
    add("--steps", type=int, help="most batches to read (default: the run's eval.steps)")
    add("--batch", type=int, help="samples in a batch (default: the run's)")
    add("--config", type=Path, help="a config.yaml (default: the one in run.dir)")
    add("--json", action="store_true", help="print one JSON object")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
