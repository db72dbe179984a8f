"""`megads-generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.errors import MegadsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except MegadsError as error:
        print(f"megads-generate: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    import torch

    from megads.train.generate import Sampling, decode_stream, generate
    from megads.train.load import load_model, run_tokenizer

    sampling = Sampling(
        options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = run_tokenizer(options.run, options.tokenizer)
    model = load_model(options.run, device=device)
    config = model.config
    prompt = tokenizer.encode(options.prompt)
    if not prompt and tokenizer.eod is not None:
        prompt = [tokenizer.eod]
    ids = generate(
        model,
        prompt,
        sampling,
        vocab_size=min(tokenizer.vocab_size, config.vocab_size),
        context=config.max_seq_length if config.position == "learned" else None,
        eod=tokenizer.eod,
        device=device,
    )
    print(options.prompt, end="", flush=True)
    for text in decode_stream(tokenizer.decode, prompt, ids):
        print(text, end="", flush=True)
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads-generate", description="Continue a text with a trained model."
    )
    add = parser.add_argument
    add("run", type=Path, help="run.dir of a training run, or one of its checkpoints")
    add("--prompt", default="", help="text to continue (default: the beginning of a document)")
    add("--max-tokens", type=int, default=100, help="most tokens to add (default: 100)")
    add("--temperature", type=float, default=0.8, help="0: the most likely token (default: 0.8)")
    add("--top-k", type=int, default=0, help="choose among the k most likely (default: all)")
    add("--top-p", type=float, default=1.0, help="choose within this probability (default: 1)")
    add("--seed", type=int, help="the same seed gives the same text (default: another each time)")
    add("--tokenizer", help="byte or a path (default: the one in the run's config.yaml)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
