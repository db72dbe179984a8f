"""The optimizer's step on the host, measured beside DeepSpeed's CPU Adam in one process.

    python scripts/bench/adam.py [--millions 50] [--threads 2] [--repeats 9] [--json FILE]

Needs a Python that has both; without DeepSpeed it measures megads alone. Two pieces of work, per
step: fp32 weights; and fp32 masters of bf16 weights, with the copy to bf16 that ends the step.
DeepSpeed gets its gradients in bf16, as its engine does, and widens them; megads has reduced them
in fp32. Contenders take turns; printed are medians, seconds per 100 M parameters, and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megads.config.schema import KernelsConfig, OptimConfig
from megads.kernels.api import select_kernels
from megads.optim.update import Update, make_update_rule

BUCKET = 6_553_600
"""Elements of a bucket of 25 MB, the default: megads updates one after the other."""
Step = Callable[[], object]


def megads_steps(numel: int) -> dict[str, Step]:
    """megads' update over buckets."""
    kernels, _ = select_kernels(KernelsConfig(), torch.device("cpu"), torch.float32)
    rule = make_update_rule(OptimConfig(), kernels.adamw)
    weights, grads = torch.randn(numel), torch.randn(numel) * 1e-3
    states = [torch.zeros(numel), torch.zeros(numel)]
    half = weights.bfloat16()
    update = Update(step=3, lr=1e-4, weight_decay=0.1)

    def parts(tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split(BUCKET)

    def step(into: Tensor | None) -> None:
        pieces = zip(parts(weights), parts(grads), *map(parts, states), strict=True)
        for at, (weight, grad, first, second) in enumerate(pieces):
            rule([weight], [grad], [[first], [second]], update)
            if into is not None:
                parts(into)[at].copy_(weight)

    return {"fp32": lambda: step(None), "bf16": lambda: step(half)}


def deepspeed_steps(numel: int) -> dict[str, Step]:
    """DeepSpeedCPUAdam, and what its engine does around it."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    master = torch.nn.Parameter(torch.randn(numel))
    master.grad = torch.randn(numel) * 1e-3
    half, half_grad = master.detach().bfloat16(), master.grad.bfloat16()
    adam = DeepSpeedCPUAdam([master], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def mixed() -> None:
        assert master.grad is not None
        master.grad.copy_(half_grad)
        adam.step()
        half.copy_(master.detach())

    return {"fp32": adam.step, "bf16": mixed}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=float, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numel = int(options.millions * 1e6)
    contenders = {"megads": megads_steps(numel), "deepspeed": deepspeed_steps(numel)}
    times: dict[str, list[float]] = {}
    for turn in range(options.repeats + 1):
        for who, steps in contenders.items():
            for kind, step in steps.items():
                start = time.perf_counter()
                step()
                if turn:  # the first one touches memory and, for DeepSpeed, compiles
                    seconds = (time.perf_counter() - start) * 1e8 / numel
                    times.setdefault(f"{who} {kind}", []).append(seconds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    for name, value in middle.items():
        print(f"{name:16} {value:.4f} s per 100 M parameters (least {min(times[name]):.4f})")
    for kind in ("fp32", "bf16"):
        if f"deepspeed {kind}" in middle:
            print(f"{kind}: {middle[f'megads {kind}'] / middle[f'deepspeed {kind}']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"millions": options.millions, "times": times}))


if __name__ == "__main__":
    main()
