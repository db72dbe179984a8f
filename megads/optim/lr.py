"""Learning rate as a pure function of progress; nothing is stored and nothing needs resuming.

Progress is measured at the end of the update it is for. In steps, the n-th update of a run
(counted from 1) uses lr(n); in samples, an update uses lr(samples consumed by it and all before
it). So the first update of a warmup has a rate above zero, the last scheduled update uses exactly
`min_lr`, and with a batch-size ramp-up or a changed batch size the samples really consumed decide,
never a step count times a batch size. An update that is skipped (fp16 overflow) consumes its step
and its samples all the same.

With w = warmup, T = total and x = (n - w) / (T - w), after a linear warmup lr * n / w:

- constant: lr
- linear: min_lr + (lr - min_lr) (1 - x)
- cosine: min_lr + (lr - min_lr) (1 + cos(pi x)) / 2            (SGDR, arXiv:1608.03983)
- inverse_sqrt: max(min_lr, lr sqrt(max(w, 1) / n))             (arXiv:1706.03762)
- wsd: lr, and over the last `decay` before T linearly down to min_lr; with decay = 0 it stays lr
  (warmup, stable, decay; arXiv:2404.06395)

linear, cosine and wsd with a decay stay at min_lr after T; constant and inverse_sqrt have no end.
"""

from __future__ import annotations

import math

from megads.config.schema import OptimConfig


def learning_rate(config: OptimConfig, progress: float, total: int) -> float:
    """Rate of the update that brings the run to `progress`, in `config.units` (steps or samples).

    `total` is the length of the run in the same units; `config.total` overrides it. Raises
    ValueError when `progress` is not positive: there is no update before the first.
    """
    if progress <= 0:
        raise ValueError(f"the first update has progress 1 or more, not {progress}")
    peak, low, warmup = config.lr, config.min_lr, config.warmup
    end = config.total or total
    if progress < warmup:
        return peak * progress / warmup
    match config.schedule:
        case "constant":
            return peak
        case "inverse_sqrt":
            return max(low, peak * math.sqrt(max(warmup, 1) / max(progress, 1)))
        case "wsd":
            if not config.decay:
                return peak
            return _interpolate(
                peak, low, 1 - _share(progress, max(warmup, end - config.decay), end)
            )
        case "linear":
            return _interpolate(peak, low, 1 - _share(progress, warmup, end))
        case "cosine":
            share = _share(progress, warmup, end)
            return _interpolate(peak, low, (1 + math.cos(math.pi * share)) / 2)


def _share(progress: float, start: float, end: float) -> float:
    """How much of [start, end] lies behind `progress`, in [0, 1]; an empty range is all behind."""
    if progress >= end:
        return 1.0
    return max(0.0, (progress - start) / (end - start))


def _interpolate(high: float, low: float, weight: float) -> float:
    """`high` at weight 1, exactly `low` at weight 0."""
    return low + (high - low) * weight
