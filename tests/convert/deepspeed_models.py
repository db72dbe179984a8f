"""Two small models of Megatron-DeepSpeed, and checkpoints of them in which elements are known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.source import Kind, Source
from tests.convert.deepspeed_cases import (
    KINDS,
    Dialect,
    Layout,
    canonical,
    namespace,
    stamped,
    write_checkpoint,
)

THIRDS = Dialect(first_block=2, norm=0, head=1, qkv="thirds")
BLOOM: dict[str, Any] = {
    "num_layers": 5,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 12,
    "max_position_embeddings": 16,
    "embed_layernorm": True,
    "bias_gelu_fusion": True,
    "make_vocab_size_divisible_by": 8,
    "position_embedding_type": 3,
}
LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 8,
    "normalization": "rmsnorm",
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "use_rotary_position_embeddings": True,
}


def model_of(args: Mapping[str, Any], **changes: Any) -> ModelConfig:
    """The model of the settings above, put down by hand."""
    llama = "normalization" in args
    sizes = {key: args[key] for key in ("num_layers", "hidden_size", "num_attention_heads")}
    biases = bool(args.get("add_bias_linear", True))
    return ModelConfig(
        **sizes,
        num_kv_heads=args.get("num_key_value_heads"),
        ffn_hidden_size=args["ffn_hidden_size"],
        max_seq_length=16,
        vocab_size=101,
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu_tanh",
        position="rope" if llama else "alibi",
        tie_embeddings=not llama,
        embedding_norm=not llama,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), biases),
        **changes,
    )


def written(
    folder: Path,
    dialect: Dialect,
    args: Mapping[str, Any],
    layout: Layout,
    tensors: Mapping[Kind, Mapping[str, Tensor]] | None = None,
) -> Path:
    """A checkpoint with the settings `args`; returns its step's folder."""
    states = namespace(**args, words=101, tensor_model_parallel_size=layout.tp)
    return write_checkpoint(folder, dialect, model_of(args), layout, states, tensors)


def same(source: Source, model: ModelConfig) -> None:
    """Every element of all kinds is where it was stamped."""
    for kind in KINDS:
        got = canonical(source, kind)
        for name, want in stamped(model, kind).items():
            assert got[name].dtype == torch.float32
            assert torch.equal(got[name], want), (kind, name)
