"""Floating-point operations of a training step, and peaks of devices. Pure.

A multiplication of `[m, k]` by `[k, n]` is 2mkn operations. Counted are the matrix products of the
model as it is written down: all projections, the head, and both attention products over all pairs
of positions, whether or not a causal mask, a window or documents leave some out. Not counted are
element-wise work, lookups and vocabulary padding. What recomputation does again is counted apart:
model FLOPs utilisation (MFU) is without it, hardware FLOPs utilisation (HFU) with it (Korthikanti
et al. 2022, arXiv 2205.05198). The former is what `torch.utils.flop_counter` reports for the plain
model, and for one token

    6 x (weights of the matrix products) + 12 x layers x heads x head_dim x seq_length

(Narayanan et al. 2021, arXiv 2104.04473, appendix, without its fixed 4h MLP and full KV heads).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megads.config.model import ModelConfig

BACKWARD_PER_FORWARD = 2
"""Each forward product has two in backward: for its input and for its weight."""


@dataclass(frozen=True)
class ForwardFlops:
    """Forward operations of the parts of a model, for the batch they were asked for."""

    embedding: int
    block: int
    head: int

    def total(self, num_layers: int) -> int:
        """Operations of the whole model."""
        return self.embedding + num_layers * self.block + self.head


def forward_flops(config: ModelConfig, batch_size: int, seq_length: int) -> ForwardFlops:
    """Forward operations on `batch_size` sequences, by part; a lookup has none."""
    tokens = batch_size * seq_length
    attention = attention_flops(config, batch_size, seq_length)
    return ForwardFlops(
        embedding=0,
        block=2 * tokens * block_matmul_weights(config) + attention,
        head=2 * tokens * config.vocab_size * config.hidden_size,
    )


def attention_flops(config: ModelConfig, batch_size: int, seq_length: int) -> int:
    """Forward operations of one block's products of queries with keys, and of those with values."""
    query = config.num_attention_heads * config.head_dim
    return 2 * (2 * batch_size * seq_length * seq_length * query)


def block_matmul_weights(config: ModelConfig) -> int:
    """Weights of one block that take part in a matrix product."""
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query + 2 * key_value) + query * config.hidden_size
    mlp = (3 if config.gated else 2) * config.hidden_size * config.ffn_hidden_size
    return attention + mlp


def training_flops(config: ModelConfig, batch_size: int, seq_length: int) -> int:
    """Operations of forward and backward on `batch_size` sequences, over all devices together.

    For a step, `batch_size` is the global batch size.
    """
    forward = forward_flops(config, batch_size, seq_length).total(config.num_layers)
    return (1 + BACKWARD_PER_FORWARD) * forward


def recomputed_flops(
    config: ModelConfig,
    batch_size: int,
    seq_length: int,
    *,
    recompute: Literal["none", "selective", "full"],
    layers: int | None,
    chunks: Sequence[int],
) -> int:
    """Operations that a step does again instead of keeping their results, over all devices.

    With `recompute` "full" the forward pass of blocks: of the first `layers` in each of the model's
    chunks, which have `chunks` layers, or of all. With "selective" attention in every block; what a
    fused kernel recomputes of it by itself in its backward pass is not counted.
    """
    if recompute == "none":
        return 0
    if recompute == "selective":
        return config.num_layers * attention_flops(config, batch_size, seq_length)
    blocks = sum(n if layers is None else min(n, layers) for n in chunks)
    return blocks * forward_flops(config, batch_size, seq_length).block


# Dense peaks in TFLOP/s from NVIDIA's data sheets and architecture papers: tensor cores for bf16
# and fp16 with fp32 accumulation, plain fp32 (torch does not use TF32 unless told to). A device is
# known by all words of its name, so that a variant with another peak is unknown rather than wrong.
_PEAKS: dict[tuple[str, ...], dict[str, float]] = {
    ("V100",): {"fp16": 125.0, "fp32": 15.7},
    ("V100", "PCIE"): {"fp16": 112.0, "fp32": 14.0},
    ("T4",): {"fp16": 65.0, "fp32": 8.1},
    ("A100",): {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    ("A800",): {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    ("A40",): {"bf16": 149.7, "fp16": 149.7, "fp32": 37.4},
    ("A30",): {"bf16": 165.0, "fp16": 165.0, "fp32": 10.3},
    ("A10",): {"bf16": 125.0, "fp16": 125.0, "fp32": 31.2},
    ("L4",): {"bf16": 121.0, "fp16": 121.0, "fp32": 30.3},
    ("L40S",): {"bf16": 362.0, "fp16": 362.0, "fp32": 91.6},
    ("H100",): {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
    ("H100", "PCIE"): {"bf16": 756.0, "fp16": 756.0, "fp32": 51.0},
    ("H100", "NVL"): {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},
    ("H800",): {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
    ("H200",): {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
    ("H200", "NVL"): {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},
    ("GH200",): {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},
    ("B200",): {"bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0},
}
_SILENT_WORDS = re.compile(r"NVIDIA|TESLA|SXM\d*|HBM3E?|\d+GB?")
_NEUTRAL_FORM_FACTOR = {"A100", "A800", "A40", "A30", "A10", "L4", "L40S", "T4"}


def device_peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in TFLOP/s, or None for a device or format that is not known.

    `device_name` as torch.cuda.get_device_name gives it; `precision` is fp32, bf16 or fp16.
    """
    words = [w for w in re.split(r"[\s\-_]+", device_name.upper()) if w]
    key = tuple(w for w in words if not _SILENT_WORDS.fullmatch(w))
    if key and key[0] in _NEUTRAL_FORM_FACTOR and key[1:] == ("PCIE",):
        key = key[:1]
    return _PEAKS.get(key, {}).get(precision)
