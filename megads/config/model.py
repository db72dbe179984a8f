"""The model's part of the configuration: family choices and sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megads.config.fields import (
    NUMBER,
    Fraction,
    Group,
    Positive,
    PositiveFloat,
    divisors,
    whole,
)


class RopeScaling(Group):
    """Scaling of the rotary frequencies for contexts longer than the pretraining one."""

    kind: Literal["linear", "llama3"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_length: Positive = 8192

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        return self


class ModelConfig(Group):
    """Family choices and sizes of a decoder-only transformer.

    Sizes given as None are derived when the object is made: `num_kv_heads` = heads, `head_dim` =
    hidden / heads, `ffn_hidden_size` = 4 x hidden. After construction none of them is None.
    """

    name: str = "custom"
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_kv_heads: Positive = None  # type: ignore[assignment]
    head_dim: Positive = None  # type: ignore[assignment]
    ffn_hidden_size: Positive = None  # type: ignore[assignment]
    vocab_size: Positive
    vocab_multiple: Positive = 128
    """Each tensor-parallel rank's share of the vocabulary is padded to a multiple of this."""
    max_seq_length: Positive = 2048

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu_tanh"
    position: Literal["learned", "rope", "alibi", "none"] = "learned"
    rope_theta: PositiveFloat = 10000.0
    rope_fraction: Annotated[float, Field(gt=0.0, le=1.0), NUMBER] = 1.0
    """Share of each head's dimensions that is rotated (NeoX and Pythia rotate a quarter)."""
    rope_scaling: RopeScaling | None = None
    attention_window: Positive | None = None
    """Sliding window: a token attends to this many tokens, itself included. None: all before it."""
    qkv_bias: bool = True
    attn_out_bias: bool = True
    mlp_bias: bool = True
    parallel_residual: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    embedding_norm: bool = False
    """LayerNorm right after the word embedding (BLOOM)."""
    tie_embeddings: bool = True

    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    init_std: PositiveFloat = 0.02
    init_scale_output: bool = True
    """Divide the std of attention and MLP output projections by sqrt(2 x num_layers) (GPT-2)."""

    @model_validator(mode="before")
    @classmethod
    def _derive_sizes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = whole(data.get("num_attention_heads")), whole(data.get("hidden_size"))
        if heads and hidden:
            if data.get("num_kv_heads") is None:
                data["num_kv_heads"] = heads
            if data.get("head_dim") is None:
                if hidden % heads:
                    raise ValueError(
                        f"hidden_size={hidden} is not a multiple of num_attention_heads={heads};"
                        f" heads that divide it: {divisors(hidden)} (or set head_dim)"
                    )
                data["head_dim"] = hidden // heads
            if data.get("ffn_hidden_size") is None:
                data["ffn_hidden_size"] = 4 * hidden
        return data

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; "
                f"valid: {divisors(self.num_attention_heads)}"
            )
        if self.position == "rope" and self.rotary_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} x rope_fraction={self.rope_fraction} rotates "
                f"{self.rotary_dim} dimensions; it must be an even number"
            )
        return self

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions per head."""
        return int(self.head_dim * self.rope_fraction)
