"""Every parameter of a model, in model order, as layout-free specs. Pure: no torch.

The canonical names and the canonical order of fused projections are defined here and nowhere else;
the modules that hold the tensors, the optimizer, checkpoints and converters follow them.
"""

from __future__ import annotations

import math

from megads.config.model import ModelConfig
from megads.parallel.sharding import Edge, Init, ParamSpec, Part

WORD_EMBEDDING = "embedding.word.weight"
HEAD = "head.weight"
ONES, ZEROS = Init("ones"), Init("zeros")


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Specs of all parameters, embedding first, head last; a tied head is not listed."""
    specs = _embedding_specs(config)
    for layer in range(config.num_layers):
        specs += block_specs(config, layer)
    specs += _norm("final_norm", config, edge="last")
    if not config.tie_embeddings:
        specs.append(
            ParamSpec(
                HEAD,
                (config.vocab_size, config.hidden_size),
                "embedding",
                Init("normal", config.init_std),
                tp_dim=0,
                pad_multiple=config.vocab_multiple,
                tp_gradient="sharded",
                edge="last",
            )
        )
    return specs


def param_count(config: ModelConfig) -> int:
    """Number of trainable parameters, vocabulary padding left out, a tied head counted once."""
    return sum(spec.numel for spec in param_specs(config))


def _embedding_specs(config: ModelConfig) -> list[ParamSpec]:
    normal = Init("normal", config.init_std)
    specs = [
        ParamSpec(
            WORD_EMBEDDING,
            (config.vocab_size, config.hidden_size),
            "embedding",
            normal,
            tp_dim=0,
            pad_multiple=config.vocab_multiple,
            tp_gradient="sharded",
            edge="first",
            tied=config.tie_embeddings,
        )
    ]
    if config.position == "learned":
        specs.append(
            ParamSpec(
                "embedding.position.weight",
                (config.max_seq_length, config.hidden_size),
                "embedding",
                normal,
                tp_gradient="partial_if_sequence_parallel",
                edge="first",
            )
        )
    if config.embedding_norm:
        specs += _norm("embedding.norm", config, edge="first")
    return specs


def _norm(
    name: str, config: ModelConfig, layer: int | None = None, edge: Edge | None = None
) -> list[ParamSpec]:
    kinds = {"weight": ONES} | ({"bias": ZEROS} if config.norm == "layernorm" else {})
    return [
        ParamSpec(
            f"{name}.{kind}",
            (config.hidden_size,),
            "norm",
            init,
            tp_gradient="partial_if_sequence_parallel",
            layer=layer,
            edge=edge,
        )
        for kind, init in kinds.items()
    ]


def _projection(
    name: str,
    layer: int,
    shape: tuple[int, int],
    *,
    std: float,
    tp_dim: int,
    parts: tuple[Part, ...] = (),
    bias: bool,
) -> list[ParamSpec]:
    """A linear layer: weight [out, in] split on dim 0 (column) or 1 (row), and its bias."""
    specs = [
        ParamSpec(
            f"{name}.weight",
            shape,
            "matrix",
            Init("normal", std),
            tp_dim=tp_dim,
            parts=parts,
            tp_gradient="sharded",
            layer=layer,
        )
    ]
    if bias and tp_dim == 0:
        specs.append(
            ParamSpec(
                f"{name}.bias",
                shape[:1],
                "bias",
                ZEROS,
                tp_dim=0,
                parts=parts,
                tp_gradient="sharded",
                layer=layer,
            )
        )
    elif bias:
        specs.append(
            ParamSpec(
                f"{name}.bias",
                shape[:1],
                "bias",
                ZEROS,
                tp_gradient="partial_if_sequence_parallel",
                layer=layer,
            )
        )
    return specs


def block_specs(config: ModelConfig, layer: int) -> list[ParamSpec]:
    """Specs of transformer block `layer` (global index)."""
    prefix, hidden, ffn = f"blocks.{layer}", config.hidden_size, config.ffn_hidden_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
    std = config.init_std
    out_std = std / math.sqrt(2 * config.num_layers) if config.init_scale_output else std
    qkv = (Part("q", heads, head_dim), Part("k", kv_heads, head_dim), Part("v", kv_heads, head_dim))
    gate_up = (Part("gate", ffn), Part("up", ffn)) if config.gated else (Part("up", ffn),)

    specs = _norm(f"{prefix}.attn_norm", config, layer)
    specs += _projection(
        f"{prefix}.attn.qkv",
        layer,
        (sum(p.size for p in qkv), hidden),
        std=std,
        tp_dim=0,
        parts=qkv,
        bias=config.qkv_bias,
    )
    if config.qk_norm:
        for which in ("q", "k"):
            specs.append(
                ParamSpec(
                    f"{prefix}.attn.{which}_norm.weight",
                    (head_dim,),
                    "norm",
                    ONES,
                    tp_gradient="partial",
                    layer=layer,
                )
            )
    specs += _projection(
        f"{prefix}.attn.out",
        layer,
        (hidden, heads * head_dim),
        std=out_std,
        tp_dim=1,
        bias=config.attn_out_bias,
    )
    specs += _norm(f"{prefix}.mlp_norm", config, layer)
    specs += _projection(
        f"{prefix}.mlp.up",
        layer,
        (sum(p.size for p in gate_up), hidden),
        std=std,
        tp_dim=0,
        parts=gate_up,
        bias=config.mlp_bias,
    )
    specs += _projection(
        f"{prefix}.mlp.down",
        layer,
        (hidden, ffn),
        std=out_std,
        tp_dim=1,
        bias=config.mlp_bias,
    )
    return specs
