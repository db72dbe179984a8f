"""Hugging Face checkpoints from outside: their bytes, and what `transformers` makes of them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.run import convert, open_checked
from megads.convert.source import Kind, ReadOptions, Source, WriteOptions
from megads.models.families import param_specs

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def raw_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, decoded here byte by byte."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                assert entry == {"format": "pt"}
                continue
            low, high = (start + offset for offset in entry["data_offsets"])
            content = torch.frombuffer(bytearray(data[low:high]), dtype=TYPES[entry["dtype"]])
            assert name not in tensors
            tensors[name] = content.view(entry["shape"])
    return tensors


def assert_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        mine, theirs = (t.contiguous().view(torch.uint8) for t in (got[name], tensor))
        assert torch.equal(mine, theirs), name


class _Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def load_quietly(directory: Path, kind: str = "") -> torch.nn.Module:
    """What `transformers` loads, in fp32, without a warning, a tensor too many or too few."""
    from transformers import AutoModelForCausalLM

    collected = _Collected()
    logger = logging.getLogger("transformers")
    logger.addHandler(collected)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, told = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
    finally:
        logger.removeHandler(collected)
    assert collected.said == []
    assert not any(told.values()), told
    assert type(model).__name__.startswith(kind)
    return model.eval()


def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def converted(
    source: Path | Source, target: Path, to: str, options: WriteOptions | None = None
) -> Path:
    """Convert everything that is in a source, which is opened if it is a path."""
    opened = open_checked(source, "auto", ReadOptions()) if isinstance(source, Path) else source
    seen: list[str] = []
    convert(opened, target, to, options or WriteOptions(), lambda kind, name: seen.append(name))
    assert sorted(seen) == sorted(spec.name for spec in param_specs(opened.model))
    return target


class InMemory(Source):
    """Canonical tensors as a checkpoint."""

    format = "memory"
    path = Path("memory")

    def __init__(self, model: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    def origins(self, kind: Kind, name: str) -> tuple[str, ...]:
        return (name,)

    def dtype(self, kind: Kind, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def tensor(self, kind: Kind, name: str) -> Tensor:
        return self.tensors[name]

    def stored(self) -> Iterator[str]:
        yield from self.tensors
