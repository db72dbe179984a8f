"""Hugging Face's architectures: what their config.json can say of a model. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megads.config.model import ModelConfig
from megads.convert.hf.names import BLOOM, GPT2, GPT_NEOX, LLAMA, OPT, NameTable
from megads.convert.hf.positions import RopeNames, WindowNames

REQUIRED = object()
PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"}
"""Names of activations, the ones to write first."""


@dataclass(frozen=True)
class Key:
    """A key of config.json and the fields of ModelConfig it stands for, which then agree.

    `default`: what a file that lacks it means. `also`: other names it has had. `instead`: one that
    is taken before this name where it is not null.
    """

    name: str
    fields: tuple[str, ...]
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    instead: str | None = None


@dataclass(frozen=True)
class Architecture:
    """What config.json of one `model_type` can say.

    `writes`: the class to name. `fixed`: our choices that it has in this way only. `needs`: keys
    that must have this value, which is also what lacking them means. `same`: keys that must equal
    another, or be null. `activation`: the key, with its default; None where it is fixed. `divides`:
    heads must divide the hidden size even when `head_dim` is given.
    """

    model_type: str
    writes: str
    names: NameTable
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    activation: tuple[str, str] | None = None
    gated: bool = False
    rope: RopeNames | None = None
    window: WindowNames | None = None
    divides: bool = True

    @property
    def activations(self) -> Mapping[str, str]:
        """Its names of activations, and ours."""
        return GATED if self.gated else PLAIN

    def misfits(self, model: ModelConfig) -> list[str]:
        """Settings of a model that this architecture does not have, as "field=value"."""
        said = {name for key in self.keys for name in key.fields}
        wanted = dict(self.fixed)
        for key in self.keys:
            wanted |= {name: getattr(model, key.fields[0]) for name in key.fields}
        derived = {
            "num_kv_heads": model.num_attention_heads,
            "head_dim": model.hidden_size // model.num_attention_heads,
            "ffn_hidden_size": 4 * model.hidden_size,
            "attention_window": None,
            "rope_fraction": 1.0,
        }
        said |= {"attention_window"} if self.window else set()
        said |= {"rope_fraction"} if self.rope == "gpt_neox" or not self.rope else set()
        wanted |= {name: value for name, value in derived.items() if name not in said}
        wrong = [name for name, value in wanted.items() if getattr(model, name) != value]
        if self.activation and model.activation not in self.activations.values():
            wrong.append("activation")
        if self.divides and model.hidden_size % model.num_attention_heads:
            wrong.append("hidden_size")
        return [f"{name}={getattr(model, name)}" for name in wrong]


def _keys(*keys: Key, tied: bool, std: str = "initializer_range") -> tuple[Key, ...]:
    """The given ones and those that all architectures have; `tied`: without a word in the file."""
    return (
        *keys,
        Key("vocab_size", ("vocab_size",)),
        Key("tie_word_embeddings", ("tie_embeddings",), tied),
        Key(std, ("init_std",), 0.02),
    )


_SIZES = (
    Key("num_hidden_layers", ("num_layers",)),
    Key("hidden_size", ("hidden_size",)),
    Key("num_attention_heads", ("num_attention_heads",)),
    Key("max_position_embeddings", ("max_seq_length",)),
)
_SHORT_SIZES = (
    Key("n_layer", ("num_layers",), also=("num_hidden_layers",)),
    Key("n_head", ("num_attention_heads",), also=("num_attention_heads",)),
    Key("layer_norm_epsilon", ("norm_eps",), 1e-5),
)
_BIASES = {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}
_NO_BIASES = dict.fromkeys(_BIASES, False)
_PLAIN_BLOCK = {"norm": "layernorm", "qk_norm": False}
_SEQUENTIAL = _PLAIN_BLOCK | {"parallel_residual": False}
_ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "attn_out_bias"), False)


def _llama_like(
    model_type: str,
    writes: str,
    *keys: Key,
    fixed: Mapping[str, Any],
    kv_heads: int | None,
    head_dim: int | None = None,
    window: WindowNames | None = None,
) -> Architecture:
    """`kv_heads`, `head_dim`: what a file that lacks them means; None: as the heads say."""
    common = {"norm": "rmsnorm", "position": "rope", "embedding_norm": False}
    return Architecture(
        model_type,
        writes,
        LLAMA,
        _keys(
            *_SIZES,
            Key("intermediate_size", ("ffn_hidden_size",)),
            Key("num_key_value_heads", ("num_kv_heads",), kv_heads),
            Key("head_dim", ("head_dim",), head_dim),
            Key("rms_norm_eps", ("norm_eps",), 1e-6),
            Key("attention_dropout", ("attention_dropout",), 0.0),
            *keys,
            tied=False,
        ),
        {**common, "parallel_residual": False, "qk_norm": False, **fixed},
        activation=("hidden_act", "silu"),
        gated=True,
        rope="llama",
        window=window,
        divides=model_type == "llama",
    )


ARCHITECTURES = (
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        GPT2,
        _keys(
            *_SHORT_SIZES,
            Key("n_embd", ("hidden_size",), also=("hidden_size",)),
            Key("n_positions", ("max_seq_length",), also=("max_position_embeddings",)),
            Key("n_inner", ("ffn_hidden_size",), None),
            Key("resid_pdrop", ("hidden_dropout",), 0.1),
            Key("attn_pdrop", ("attention_dropout",), 0.1),
            tied=True,
        ),
        _SEQUENTIAL | _BIASES | {"position": "learned", "embedding_norm": False},
        needs={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation=("activation_function", "gelu_new"),
    ),
    Architecture(
        "opt",
        "OPTForCausalLM",
        OPT,
        _keys(
            *_SIZES,
            Key("ffn_dim", ("ffn_hidden_size",)),
            Key("enable_bias", tuple(_BIASES), True),
            Key("dropout", ("hidden_dropout",), 0.1),
            Key("attention_dropout", ("attention_dropout",), 0.0),
            tied=True,
            std="init_std",
        ),
        _SEQUENTIAL | {"position": "learned", "embedding_norm": False, "norm_eps": 1e-5},
        needs={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        same={"word_embed_proj_dim": "hidden_size"},
        activation=("activation_function", "relu"),
    ),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        BLOOM,
        _keys(
            *_SHORT_SIZES,
            Key("hidden_size", ("hidden_size",), instead="n_embed"),
            Key("seq_length", ("max_seq_length",), 2048),
            Key("hidden_dropout", ("hidden_dropout",), 0.0),
            Key("attention_dropout", ("attention_dropout",), 0.0),
            tied=True,
        ),
        _SEQUENTIAL
        | _BIASES
        | {"position": "alibi", "embedding_norm": True, "activation": "gelu_tanh"},
        needs={"apply_residual_connection_post_layernorm": False},
    ),
    Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        GPT_NEOX,
        _keys(
            *_SIZES,
            Key("intermediate_size", ("ffn_hidden_size",)),
            Key("layer_norm_eps", ("norm_eps",), 1e-5),
            Key("use_parallel_residual", ("parallel_residual",), True),
            Key("attention_bias", ("qkv_bias", "attn_out_bias"), True),
            Key("hidden_dropout", ("hidden_dropout",), 0.0),
            Key("attention_dropout", ("attention_dropout",), 0.0),
            tied=False,
        ),
        _PLAIN_BLOCK | {"position": "rope", "embedding_norm": False, "mlp_bias": True},
        activation=("hidden_act", "gelu"),
        rope="gpt_neox",
    ),
    _llama_like(
        "llama",
        "LlamaForCausalLM",
        _ATTENTION_BIAS,
        Key("mlp_bias", ("mlp_bias",), False),
        fixed={},
        kv_heads=None,
    ),
    _llama_like(
        "mistral",
        "MistralForCausalLM",
        fixed=_NO_BIASES,
        kv_heads=8,
        window="mistral",
    ),
    _llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        fixed=_NO_BIASES | {"qkv_bias": True},
        kv_heads=32,
        window="qwen",
    ),
    _llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        _ATTENTION_BIAS,
        fixed={"qk_norm": True, "mlp_bias": False},
        kv_heads=32,
        head_dim=128,
        window="qwen",
    ),
)
"""In the order in which one is chosen for a model that several could hold.

Of dropout only training takes notice: GPT-2's `embd_pdrop` is taken to be its `resid_pdrop`, and
the dropout of ours that an architecture has no key for is not written.
"""
