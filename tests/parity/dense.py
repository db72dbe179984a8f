"""A dense GPT on one process, written apart from the package: the oracle of whole runs.

Batch-first, plain matrix products, an explicit mask, torch's own AdamW and clipping. Weights come
in as canonical tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.config.model import ModelConfig
from megads.config.schema import OptimConfig


def logits(w: dict[str, Tensor], c: ModelConfig, ids: Tensor) -> Tensor:
    """`ids` `[batch, seq]` -> `[batch, seq, vocab]`."""
    _batch, seq = ids.shape
    x = w["embedding.word.weight"][ids]
    if c.position == "learned":
        x = x + w["embedding.position.weight"][:seq]
    if c.embedding_norm:
        x = _norm(w, "embedding.norm", x, c)
    for i in range(c.num_layers):
        p = f"blocks.{i}"
        attended = _attention(w, p, _norm(w, f"{p}.attn_norm", x, c), c)
        if c.parallel_residual:
            x = x + attended + _mlp(w, p, _norm(w, f"{p}.mlp_norm", x, c), c)
        else:
            x = x + attended
            x = x + _mlp(w, p, _norm(w, f"{p}.mlp_norm", x, c), c)
    x = _norm(w, "final_norm", x, c)
    return x @ w.get("head.weight", w["embedding.word.weight"]).t()


def _norm(w: dict[str, Tensor], name: str, x: Tensor, c: ModelConfig) -> Tensor:
    bias = w.get(f"{name}.bias")
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps)
    return x * w[f"{name}.weight"] + (0 if bias is None else bias)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].t()
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _rotate(x: Tensor, c: ModelConfig) -> Tensor:
    """Rotary embedding of `[batch, seq, heads, d]`, pairs half a rotation apart."""
    n = int(c.head_dim * c.rope_fraction)
    angles = torch.arange(x.shape[1])[:, None] * c.rope_theta ** (-torch.arange(0, n, 2) / n)
    z = torch.complex(x[..., : n // 2], x[..., n // 2 : n]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([z.real, z.imag, x[..., n:]], -1)


def _attention(w: dict[str, Tensor], p: str, x: Tensor, c: ModelConfig) -> Tensor:
    batch, seq, _ = x.shape
    heads, kv, d = c.num_attention_heads, c.num_kv_heads, c.head_dim
    q, k, v = _linear(w, f"{p}.attn.qkv", x).split([heads * d, kv * d, kv * d], -1)
    q, k, v = q.view(batch, seq, heads, d), k.view(batch, seq, kv, d), v.view(batch, seq, kv, d)
    if c.qk_norm:
        q, k = _norm(w, f"{p}.attn.q_norm", q, c), _norm(w, f"{p}.attn.k_norm", k, c)
    if c.position == "rope":
        q, k = _rotate(q, c), _rotate(k, c)
    k, v = (t.repeat_interleave(heads // kv, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(d)
    distance = torch.arange(seq)[None] - torch.arange(seq)[:, None]
    if c.position == "alibi":  # 4 heads: slopes 1/4, 1/16, 1/64, 1/256
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
        scores = scores + slopes[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -math.inf)
    mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return _linear(w, f"{p}.attn.out", mixed.reshape(batch, seq, heads * d))


def _mlp(w: dict[str, Tensor], p: str, x: Tensor, c: ModelConfig) -> Tensor:
    up = _linear(w, f"{p}.mlp.up", x)
    if c.activation == "swiglu":
        gate, up = up.chunk(2, -1)
        up = gate * torch.sigmoid(gate) * up
    else:
        assert c.activation == "gelu_tanh"
        up = F.gelu(up, approximate="tanh")
    return _linear(w, f"{p}.mlp.down", up)


def train(
    weights: dict[str, Tensor],
    model: ModelConfig,
    optim: OptimConfig,
    batches: Sequence[Tensor],
    rates: Sequence[float],
) -> list[dict[str, Any]]:
    """One update per batch of `[samples, seq + 1]` ids; loss and gradient norm of each."""
    w = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    # Every matrix and embedding has two dimensions, every bias and norm one.
    groups = [
        {"params": [p for p in w.values() if p.dim() == 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in w.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    curve = []
    for ids, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(logits(w, model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(w.values(), optim.clip)
        optimizer.step()
        curve.append({"loss": loss.item(), "grad_norm": norm.item()})
    return curve
