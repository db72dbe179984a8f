"""Train GPT-style language models with tensor, pipeline and data parallelism and ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]


def load_model(
    checkpoint_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """The model of a checkpoint as a plain module of one process.

    Calling it on token ids `[batch, seq]` returns logits `[batch, seq, vocab_size]`, unpadded.
    `checkpoint_dir` is one checkpoint or a run directory, whose newest checkpoint is then taken;
    any layout it was saved under will do. `dtype` None keeps the saved one. Raises
    CheckpointError when there is none or it is incomplete.
    """
    from megads.train.load import load_model

    return load_model(checkpoint_dir, device=device, dtype=dtype)
