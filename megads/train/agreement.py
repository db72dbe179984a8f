"""Whether a converted model still says the same: its logits against those of transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from megads.config.model import ModelConfig
from megads.convert.run import convert
from megads.convert.source import Source, WriteOptions
from megads.errors import CheckpointError
from megads.models.families import WORD_EMBEDDING
from megads.train.load import load_model

TOLERANCE = 1e-4
"""Of logits of an ordinary size, up to 10; of larger ones in proportion."""
BATCH, POSITIONS, MOST_POSITIONS = 2, 64, 512
"""Positions are more than POSITIONS where a sliding window would not show in so few."""


def compare_logits(source: Source, result: Source) -> str:
    """Run what transformers makes of the Hugging Face side and what we make of the other, in fp32.

    Needs memory for both. Returns what to tell the user: nothing if neither side is of Hugging
    Face's, or that transformers is missing. Raises CheckpointError with the largest difference of
    the logits of random ids if it exceeds TOLERANCE.
    """
    theirs, ours = (result, source) if result.format == "hf" else (source, result)
    if theirs.format != "hf":
        return ""
    if importlib.util.find_spec("transformers") is None:
        return "not checked: logits, as transformers is not installed"
    model = ours.model
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (BATCH, _positions(model)), generator=draw)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # As the result may be of a narrower type than the source, both are rounded to it.
    dtype = result.dtype("param", WORD_EMBEDDING)
    other = AutoModelForCausalLM.from_pretrained(theirs.path, attn_implementation="eager")
    with torch.no_grad():
        want = _rounded(other.eval(), dtype)(ids).logits
        with _own_form(ours) as path:
            own = load_model(path, dtype=torch.float32)
        got = _rounded(own, dtype)(ids)
    difference, size = float((got - want).abs().max()), float(want.abs().max())
    if not difference <= TOLERANCE * max(1.0, size / 10):
        raise CheckpointError(
            f"{result.path}: logits differ by {difference:.3g} between megads and transformers; "
            f"the largest is {size:.3g}"
        )
    return (
        f"checked: logits of {ids.numel()} random ids equal those of transformers within "
        f"{difference:.1e}"
    )


def _positions(model: ModelConfig) -> int:
    """How many to compute: more than see each other, unless the window is wider than affordable."""
    length, window = POSITIONS, model.attention_window
    if window is not None and window < MOST_POSITIONS:
        length = min(window + POSITIONS, MOST_POSITIONS)
    return min(length, model.max_seq_length)


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in fp32, with values that `dtype` has."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


@contextlib.contextmanager
def _own_form(source: Source) -> Iterator[Path]:
    """A checkpoint of megads with the source's weights; a foreign one is converted for a while.

    That is where the system keeps what is temporary: killed, this leaves nothing beside the result.
    """
    if source.format == "megads":
        yield source.path
        return
    with tempfile.TemporaryDirectory(prefix="megads-check-") as folder:
        target = Path(folder) / "weights"
        options = WriteOptions(optimizer=False)
        convert(source, target, "megads", options, lambda kind, name: None)
        yield target
