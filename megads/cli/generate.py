"""`megads-generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, guarded
from megads.cli.devices import chosen_device

_EXAMPLES = """\
examples:
  megads-generate runs/mine                                   a document from its beginning
  megads-generate runs/mine --prompt "KING" --max-tokens 200
  megads-generate runs/mine --prompt "KING" --temperature 0   always the same, most likely text
  megads-generate runs/mine/checkpoints/step-500 --seed 1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    return guarded("megads-generate", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from megads.train.generate import Sampling, decode_stream, generate
    from megads.train.load import load_model, run_tokenizer

    sampling = Sampling(
        options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    device = chosen_device(options.device)
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
    try:
        for text in decode_stream(tokenizer.decode, prompt, ids):
            print(text, end="", flush=True)
    finally:
        print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("megads-generate", "Continue a text with a trained model.", _EXAMPLES)
    add = parser.add_argument
    add("run", type=Path, help="run.dir of a training run, or one of its checkpoints")
    add("--prompt", default="", help="text to continue (default: the beginning of a document)")
    most = "most tokens to add; the end of a document comes earlier (default: 100)"
    add("--max-tokens", type=int, default=100, metavar="N", help=most)
    chance = "below 1 likely tokens get likelier; 0: always the most likely one (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="T", help=chance)
    add("--top-k", type=int, default=0, metavar="K", help="among the K most likely (default: all)")
    top_p = "among the most likely ones that together have probability P (default: 1)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    add("--seed", type=int, metavar="N", help="same seed, same text (default: another each time)")
    add("--tokenizer", help="byte or a path (default: the one in the run's config.yaml)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
