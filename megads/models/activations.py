"""How many bytes a chunk keeps between the forward and the backward of a microbatch. Pure.

Counted is every tensor that autograd saves, as the `torch` kernels make them; tensors that share
memory count once, and so do weights and tables not at all. For the classic block in a 16-bit type,
with dropout and without the attention core, this is the 34 s b h of Korthikanti et al. 2022
(arXiv 2205.05198): divided by tp under sequence parallelism, else s b h (10 + 24 / tp). Fused
attention adds its fp32 logsumexp, norms their statistics; blocks recomputed in full keep 2 s b h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megads.config.model import ModelConfig
from megads.models.families import HEAD, WORD_EMBEDDING
from megads.models.stage import Chunk, stage_specs

INDEX, FLOAT, MASK = 8, 4, 1
"""Bytes of token ids, of statistics and of a dropout mask's element."""


@dataclass(frozen=True)
class PassSize:
    """One microbatch on one rank and how it is computed.

    `itemsize`: bytes of an activation; `recompute_layers`: as in GPTStage; `documents`: whether
    attention and positions stay inside of documents.
    """

    batch: int
    seq: int
    tp: int
    sequence_parallel: bool
    itemsize: int
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    documents: bool = False

    @property
    def tokens(self) -> int:
        """Rows inside of column-row pairs."""
        return self.batch * self.seq

    @property
    def rows(self) -> int:
        """Rows outside of them."""
        return self.tokens // self.tp if self.is_sequence_parallel else self.tokens

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class Kept:
    """Bytes that blocks keep, and the rest of the chunk.

    `copied`: what the blocks keep takes on the host, if it is moved there. Each tensor is copied
    by itself then, so that one that two operations read is there twice.
    """

    blocks: int
    rest: int
    copied: int


def kept_bytes(config: ModelConfig, chunk: Chunk, size: PassSize) -> Kept:
    """What one microbatch keeps in a chunk."""
    layers = len(chunk.layers)
    all_or_some = layers if size.recompute_layers is None else size.recompute_layers
    recomputed = min(all_or_some, layers) if size.recompute == "full" else 0
    whole = layers - recomputed
    stream = size.rows * config.hidden_size * size.itemsize
    inside, shared = _block(config, size)
    blocks = layers * stream + whole * inside
    rest = _embedding(config, size) if chunk.has_embedding else 0
    if config.position == "rope" and (size.batch > 1 or size.documents) and whole:
        rest += size.tokens * config.rotary_dim * size.itemsize
    if size.documents and size.device != "cpu" and size.recompute != "selective" and whole:
        rest += size.batch * _bias_heads(config, size) * size.seq**2 * size.itemsize
    if chunk.has_head:
        rest += _head(config, chunk, size)
    return Kept(blocks, rest, blocks + whole * shared)


def table_bytes(config: ModelConfig, chunk: Chunk, size: PassSize) -> int:
    """Tables that a chunk makes once: rotary cosines and sines, a bias of attention."""
    if not chunk.layers:
        return 0
    rotary = size.seq * config.rotary_dim * size.itemsize if config.position == "rope" else 0
    row = _bias_heads(config, size) * size.seq
    has_alibi, is_windowed = config.position == "alibi", _is_windowed(config, size)
    if size.device != "cpu":
        has_bias = has_alibi or is_windowed or size.documents
        return rotary + (size.itemsize * row * size.seq if has_bias else 0)
    # Fused attention on a CPU knows causality by itself and takes ALiBi as a row per head.
    if is_windowed or config.attention_dropout:
        return rotary + FLOAT * row * size.seq
    return rotary + (FLOAT * row if has_alibi else 0)


def _bias_heads(config: ModelConfig, size: PassSize) -> int:
    """Of a bias of attention: one unless each of this rank's heads has its own."""
    return config.num_attention_heads // size.tp if config.position == "alibi" else 1


def _is_windowed(config: ModelConfig, size: PassSize) -> bool:
    return config.attention_window is not None and config.attention_window < size.seq


@dataclass(frozen=True)
class _Heads:
    """Bytes of this rank's `[tokens, heads, head_dim]`, and elements of `[tokens, heads]`."""

    q: int
    k: int
    rows_q: int
    rows_k: int


def _heads(config: ModelConfig, size: PassSize) -> _Heads:
    q, k = config.num_attention_heads // size.tp, max(config.num_kv_heads // size.tp, 1)
    width = config.head_dim * size.itemsize
    return _Heads(
        size.tokens * q * width, size.tokens * k * width, size.tokens * q, size.tokens * k
    )


def _block(config: ModelConfig, size: PassSize) -> tuple[int, int]:
    """Bytes that a block keeps beside its input, and how many more were saved: what two operations
    save is there once."""
    stream = size.rows * config.hidden_size * size.itemsize
    attention, shared = _attention(config, size)
    ffn = size.tokens * config.ffn_hidden_size // size.tp * size.itemsize
    # ReLU knows its gradient from its result; the others read what they were given.
    before = {"relu": 0, "swiglu": 2 * ffn, "geglu": 2 * ffn}.get(config.activation, ffn)
    norms = 2 * (stream + _statistics(config, size, size.rows))
    if config.activation == "relu":
        shared += ffn
    if config.parallel_residual:
        shared += stream  # both norms read the block's input
    else:
        norms += stream
    masks = 2 * size.rows * config.hidden_size * MASK if config.hidden_dropout else 0
    return attention + norms + before + ffn + masks, shared


def _attention(config: ModelConfig, size: PassSize) -> tuple[int, int]:
    """Bytes kept from the qkv projection's result to the output projection's input."""
    heads, on_cpu = _heads(config, size), size.device == "cpu"
    qkv, normed = heads.q + 2 * heads.k, 0
    if config.qk_norm:  # reads qkv and gives copies
        normed = heads.q + heads.k + FLOAT * (heads.rows_q + heads.rows_k)
    if size.recompute == "selective":
        return qkv + normed + heads.q, 0
    if config.attention_dropout and on_cpu:
        return _reference_attention(config, size)
    kept = qkv + normed + heads.q + FLOAT * heads.rows_q
    has_bias = config.position == "alibi" or _is_windowed(config, size) or size.documents
    if heads.q != heads.k and not on_cpu and (has_bias or size.itemsize == FLOAT):
        kept += 2 * heads.q  # keys and values, repeated for a kernel that knows no groups
    return kept, heads.q


def _reference_attention(config: ModelConfig, size: PassSize) -> tuple[int, int]:
    """Queries, keys and values per query head, the softmax, its mask and what is left of it.

    Of the projection's result more is alive on the device than was saved.
    """
    heads = _heads(config, size)
    qkv, pairs = heads.q + 2 * heads.k, heads.rows_q * size.seq
    kept = 4 * heads.q + pairs * (FLOAT + MASK + size.itemsize)
    if config.qk_norm:
        return kept + qkv + FLOAT * (heads.rows_q + heads.rows_k), -heads.k
    if size.batch == 1 or heads.rows_q == size.tokens:  # queries need not be copied
        return kept + qkv - heads.q, heads.q - qkv
    return kept, 0


def _statistics(config: ModelConfig, size: PassSize, rows: int) -> int:
    """Of a norm over the hidden size: mean and deviation, or the root mean square alone."""
    if config.norm == "rmsnorm":
        return FLOAT * rows
    return 2 * rows * (size.itemsize if size.device == "cpu" else FLOAT)


def _embedding(config: ModelConfig, size: PassSize) -> int:
    kept = INDEX * size.tokens
    if size.tp > 1:
        kept += MASK * size.tokens
    if size.documents and config.position == "learned":
        kept += INDEX * size.rows
    if config.embedding_norm:
        kept += size.rows * config.hidden_size * size.itemsize
        kept += _statistics(config, size, size.rows)
    if config.hidden_dropout:
        kept += size.rows * config.hidden_size * MASK
    return kept


def _head(config: ModelConfig, chunk: Chunk, size: PassSize) -> int:
    """Final norm with its input and result, exponentials of the logits, what the loss of each token
    needs."""
    specs = stage_specs(config, chunk)
    columns = specs[HEAD if HEAD in specs else WORD_EMBEDDING].local_shape(size.tp)[0]
    stream = size.rows * config.hidden_size * size.itemsize
    logits = size.tokens * columns * size.itemsize
    losses = size.tokens * (INDEX + (3 if size.documents else 2) * FLOAT)  # with a mask, or without
    return 2 * stream + _statistics(config, size, size.rows) + logits + losses
