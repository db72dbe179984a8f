"""Tiny random `transformers` models, the config of ours that should equal them, and their tensors
under canonical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megads.config.model import ModelConfig

SEQ = 24
VOCAB = 101


@dataclass(frozen=True)
class Family:
    """How to make a `transformers` model (class, config class, its arguments) and our config."""

    name: str
    hf: dict[str, Any]
    ours: dict[str, Any]
    canonical: Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]]
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Negative controls: changes of our config after which the logits must differ."""

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.model_validate(
            {"num_layers": 3, "vocab_size": VOCAB, "vocab_multiple": 8, "max_seq_length": 32}
            | self.ours
        )

    def build(self, seed: int = 3) -> nn.Module:
        """The other library's model, every parameter random."""
        import transformers

        config = getattr(transformers, f"{self.name}Config")(
            vocab_size=VOCAB, attn_implementation="eager", **self.hf
        )
        model = getattr(
            transformers, f"{self.name}{'LMHeadModel' if self.name == 'GPT2' else 'ForCausalLM'}"
        )(config)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.randn(param.shape, generator=source) * 0.25)
                if "norm" in name.rpartition(".")[0].lower() or ".ln_" in name:
                    param.add_(1.0 if name.endswith("weight") else 0.0)
        return model.float().eval()

    def tensors(self, model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
        """Weights, or gradients, under canonical names."""
        named = model.named_parameters(remove_duplicate=True)
        raw = {n: (p.grad if gradients else p.detach()) for n, p in named}
        return self.canonical(raw, self.config)  # type: ignore[arg-type]


def _pair(out: dict[str, Tensor], name: str, raw: Mapping[str, Tensor], source: str) -> None:
    out[f"{name}.weight"] = raw[f"{source}.weight"]
    if f"{source}.bias" in raw:
        out[f"{name}.bias"] = raw[f"{source}.bias"]


def _gpt2(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {
        "embedding.word.weight": raw["transformer.wte.weight"],
        "embedding.position.weight": raw["transformer.wpe.weight"],
    }
    for i in range(config.num_layers):
        theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
        _pair(out, f"{ours}.attn_norm", raw, f"{theirs}.ln_1")
        _pair(out, f"{ours}.mlp_norm", raw, f"{theirs}.ln_2")
        for a, b in (
            ("attn.qkv", "attn.c_attn"),
            ("attn.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            out[f"{ours}.{a}.weight"] = raw[f"{theirs}.{b}.weight"].t().contiguous()
            out[f"{ours}.{a}.bias"] = raw[f"{theirs}.{b}.bias"]
    _pair(out, "final_norm", raw, "transformer.ln_f")
    return out


def _llama(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {"embedding.word.weight": raw["model.embed_tokens.weight"]}
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        _pair(out, f"{ours}.attn_norm", raw, f"{theirs}.input_layernorm")
        _pair(out, f"{ours}.mlp_norm", raw, f"{theirs}.post_attention_layernorm")
        for kind in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{kind}" in raw:
                parts = [raw[f"{theirs}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
                out[f"{ours}.attn.qkv.{kind}"] = torch.cat(parts)
        for x in "qk":
            if f"{theirs}.self_attn.{x}_norm.weight" in raw:
                _pair(out, f"{ours}.attn.{x}_norm", raw, f"{theirs}.self_attn.{x}_norm")
        _pair(out, f"{ours}.attn.out", raw, f"{theirs}.self_attn.o_proj")
        gate_up = [raw[f"{theirs}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        out[f"{ours}.mlp.up.weight"] = torch.cat(gate_up)
        _pair(out, f"{ours}.mlp.down", raw, f"{theirs}.mlp.down_proj")
    _pair(out, "final_norm", raw, "model.norm")
    if not config.tie_embeddings:
        out["head.weight"] = raw["lm_head.weight"]
    return out


def _by_head(fused: Tensor, config: ModelConfig) -> Tensor:
    """Rows (head; q, k, v; d) -> (q, k, v; head; d)."""
    rows = fused.view(config.num_attention_heads, 3, config.head_dim, *fused.shape[1:])
    return rows.transpose(0, 1).reshape(fused.shape)


def _neox_like(
    raw: Mapping[str, Tensor], config: ModelConfig, prefix: str, attention: str, mlp_norm: str
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for i in range(config.num_layers):
        theirs, ours = f"{prefix}.{i}", f"blocks.{i}"
        _pair(out, f"{ours}.attn_norm", raw, f"{theirs}.input_layernorm")
        _pair(out, f"{ours}.mlp_norm", raw, f"{theirs}.{mlp_norm}")
        for kind in ("weight", "bias"):
            fused = raw[f"{theirs}.{attention}.query_key_value.{kind}"]
            out[f"{ours}.attn.qkv.{kind}"] = _by_head(fused, config)
        _pair(out, f"{ours}.attn.out", raw, f"{theirs}.{attention}.dense")
        _pair(out, f"{ours}.mlp.up", raw, f"{theirs}.mlp.dense_h_to_4h")
        _pair(out, f"{ours}.mlp.down", raw, f"{theirs}.mlp.dense_4h_to_h")
    return out


def _bloom(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {"embedding.word.weight": raw["transformer.word_embeddings.weight"]}
    _pair(out, "embedding.norm", raw, "transformer.word_embeddings_layernorm")
    out |= _neox_like(raw, config, "transformer.h", "self_attention", "post_attention_layernorm")
    _pair(out, "final_norm", raw, "transformer.ln_f")
    return out


def _neox(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {"embedding.word.weight": raw["gpt_neox.embed_in.weight"]}
    out |= _neox_like(raw, config, "gpt_neox.layers", "attention", "post_attention_layernorm")
    _pair(out, "final_norm", raw, "gpt_neox.final_layer_norm")
    head = "embed_out.weight" if "embed_out.weight" in raw else "lm_head.weight"
    out["head.weight"] = raw[head]
    return out


def _llama_like(
    hidden: int, heads: int, kv: int, ffn: int, *, tied: bool = False, **extra: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(theirs, ours); `extra` has our fields apart from sizes."""
    head_dim = extra.get("head_dim", hidden // heads)
    theirs = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "num_hidden_layers": 3,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    ours = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv,
        "ffn_hidden_size": ffn,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "activation": "swiglu",
        "position": "rope",
        "qkv_bias": False,
        "attn_out_bias": False,
        "mlp_bias": False,
        "tie_embeddings": tied,
    }
    return theirs, ours | extra


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """The argument under which both generations of transformers read rotary settings."""
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"} | scaling}


def _make_families() -> dict[str, Family]:
    scaling = {"kind": "llama3", "factor": 8.0, "original_max_seq_length": 16}
    theirs_scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    llama_hf, llama = _llama_like(48, 8, 2, 44, rope_theta=500.0, rope_scaling=scaling)
    mistral_hf, mistral = _llama_like(36, 6, 2, 50, rope_theta=1000.0)
    qwen2_hf, qwen2 = _llama_like(32, 4, 2, 44, tied=True, rope_theta=300.0, qkv_bias=True)
    qwen3_hf, qwen3 = _llama_like(36, 4, 2, 44, rope_theta=300.0, head_dim=10, qk_norm=True)
    wrong_rope = {"theta": {"rope_theta": 100.0}, "kind of gate": {"activation": "geglu"}}
    gpt2 = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 44}
    gpt2_hf = {"n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 44}
    neox = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "ffn_hidden_size": 44,
        "activation": "gelu",
        "position": "rope",
        "rope_fraction": 0.5,
        "rope_theta": 300.0,
        "parallel_residual": True,
        "tie_embeddings": False,
    }
    neox_hf = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "max_position_embeddings": 32,
    } | _rope(300.0, partial_rotary_factor=0.5)

    def bloom(hidden: int, heads: int) -> Family:
        return Family(
            "Bloom",
            {"hidden_size": hidden, "n_head": heads, "n_layer": 3},
            {
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "position": "alibi",
                "embedding_norm": True,
            },
            _bloom,
            {"no bias": {"position": "none"}, "gelu": {"activation": "relu"}},
        )

    return {
        "gpt2": Family("GPT2", gpt2_hf, gpt2, _gpt2, {"gelu": {"activation": "gelu"}}),
        "llama": Family(
            "Llama",
            llama_hf | _rope(500.0, **theirs_scaling),
            llama,
            _llama,
            wrong_rope
            | {
                "no scaling": {"rope_scaling": None},
                "linear scaling": {"rope_scaling": {"kind": "linear", "factor": 8.0}},
            },
        ),
        "mistral": Family(
            "Mistral",
            mistral_hf | _rope(1000.0) | {"sliding_window": None},
            mistral,
            _llama,
            wrong_rope,
        ),
        "mistral window": Family(
            "Mistral",
            mistral_hf | _rope(1000.0) | {"sliding_window": 7},
            mistral | {"attention_window": 7},
            _llama,
            {"window 6": {"attention_window": 6}, "no window": {"attention_window": None}},
        ),
        "qwen2": Family("Qwen2", qwen2_hf | _rope(300.0), qwen2, _llama, wrong_rope),
        "qwen3": Family("Qwen3", qwen3_hf | _rope(300.0), qwen3, _llama, wrong_rope),
        "bloom": bloom(32, 4),
        "bloom, 6 heads": bloom(36, 6),
        "neox": Family(
            "GPTNeoX",
            neox_hf | {"use_parallel_residual": True},
            neox,
            _neox,
            {"sequential": {"parallel_residual": False}, "all rotated": {"rope_fraction": 1.0}},
        ),
        "neox, sequential": Family(
            "GPTNeoX",
            neox_hf | {"use_parallel_residual": False},
            neox | {"parallel_residual": False},
            _neox,
            {"parallel": {"parallel_residual": True}},
        ),
    }


FAMILIES = _make_families()
