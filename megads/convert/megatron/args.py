"""The model that Megatron-LM's stored arguments describe, and the arguments of a model.

Arguments that change the model in ways there is nothing for here are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megads.config.model import ModelConfig, RopeScaling
from megads.convert.pickle_names import Inert
from megads.errors import CheckpointError

_REFUSED = (
    "num_experts",
    "mtp_num_layers",
    "multi_latent_attention",
    "experimental_attention_variant",
    "attention_output_gate",
    "rotary_interleaved",
    "qk_l2_norm",
    "squared_relu",
    "quick_geglu",
    "glu_activation",
    "apply_residual_connection_post_layernorm",
    "layernorm_zero_centered_gamma",
    "apply_layernorm_1p",
    "window_attn_skip_freq",
    "no_rope_freq",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "enable_mhc_connections",
    "use_mup",
    "linear_attention_type",
    "linear_attention_freq",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "retro_add_retriever",
    "softmax_scale",
    "glu_linear_offset",
    "activation_func_clamp_value",
)
_ONLY = {"softmax_type": "vanilla"}
"""Arguments that must have this value, if they are there."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none", "alibi": "alibi"}
_OLD_POSITIONS = {1: "rope", 2: "learned", 3: "alibi"}
"""Values of an enumeration that a fork's files before core have."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is known beside the arguments. `before_core`: who wrote them."""

    vocab_size: int
    before_core: bool = False


def read_model(args: Arguments, setting: Setting) -> ModelConfig:
    """The model of `args`; raises CheckpointError naming an argument that has no equal here."""
    refused = [name for name in _REFUSED if args.get(name)]
    refused += [name for name, only in _ONLY.items() if args.get(name) not in (None, only)]
    if refused:
        raise CheckpointError(f"not supported: Megatron-LM's {refused[0]}={args[refused[0]]!r}")
    heads = args.get("num_attention_heads")
    norm = _one_of(args, "normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
    if args.get("qk_layernorm") and norm != "rmsnorm":
        raise CheckpointError("not supported: Megatron-LM's qk_layernorm with LayerNorm")
    biases = bool(args.get("add_bias_linear", True))
    position = _position(args)
    fields = {
        "num_layers": args.get("num_layers"),
        "hidden_size": args.get("hidden_size"),
        "num_attention_heads": heads,
        "num_kv_heads": args.get("num_query_groups")
        if args.get("group_query_attention")
        else heads,
        "head_dim": args.get("kv_channels"),
        "ffn_hidden_size": args.get("ffn_hidden_size"),
        "vocab_size": setting.vocab_size,
        "vocab_multiple": args.get("make_vocab_size_divisible_by") or 128,
        "max_seq_length": args.get("max_position_embeddings") or args.get("seq_length"),
        "norm": norm,
        "norm_eps": args.get("layernorm_epsilon", args.get("norm_epsilon")) or 1e-5,
        "activation": _activation(args, before_core=setting.before_core),
        "position": position,
        "qkv_bias": biases or bool(args.get("add_qkv_bias")),
        "attn_out_bias": biases,
        "mlp_bias": biases,
        "qk_norm": bool(args.get("qk_layernorm")),
        "embedding_norm": bool(args.get("embed_layernorm")),
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights"),
        "attention_window": _window(args),
        "hidden_dropout": args.get("hidden_dropout", 0.0),
        "attention_dropout": args.get("attention_dropout", 0.0),
        "init_std": args.get("init_method_std") or 0.02,
    }
    if position == "rope":
        fields["rope_theta"] = args.get("rotary_base") or 10000.0
        fields["rope_fraction"] = args.get("rotary_percent") or 1.0
        fields["rope_scaling"] = _scaling(args)
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"the stored arguments describe no model: {where}: {first['msg']}"
        raise CheckpointError(text) from None


def _one_of(args: Arguments, name: str, values: Mapping[str, str]) -> str:
    """What the value of an argument means; the first of `values` if it isn't there."""
    value = args.get(name) or next(iter(values))
    if value not in values:
        raise CheckpointError(f"not supported: Megatron-LM's {name}={value!r}")
    return values[value]


def _position(args: Arguments) -> str:
    value: Any = args.get("position_embedding_type")
    if isinstance(value, Inert):
        number = value.args[0] if value.args else None
        if number not in _OLD_POSITIONS:
            raise CheckpointError(f"not supported: position_embedding_type {number!r}")
        return _OLD_POSITIONS[number]
    if args.get("use_rotary_position_embeddings"):
        return "rope"
    return _one_of(args, "position_embedding_type", _POSITIONS)


def _activation(args: Arguments, *, before_core: bool) -> str:
    """GELU fused with the bias is the tanh approximation in Megatron-LM, by itself it is exact.

    It is fused unless that is turned off, or there is no bias.
    """
    if args.get("swiglu"):
        return "swiglu"
    tanh = args.get("bias_gelu_fusion", args.get("add_bias_linear", True))
    if before_core and args.get("openai_gelu"):
        tanh = True
    return "gelu_tanh" if tanh else "gelu"


def _window(args: Arguments) -> int | None:
    """Megatron-LM counts the tokens before, and leaves out the token itself."""
    size = args.get("window_size")
    if size is None:
        return None
    try:
        before = int(size[0])
    except (TypeError, ValueError, LookupError):
        raise CheckpointError(f"the stored arguments say window_size={size!r}") from None
    return None if before < 0 else before + 1


def _scaling(args: Arguments) -> dict[str, Any] | None:
    if args.get("use_rope_scaling"):
        return {"kind": "llama3", "factor": args.get("rope_scaling_factor", 8.0)}
    factor = args.get("rotary_seq_len_interpolation_factor")
    return {"kind": "linear", "factor": factor} if factor not in (None, 1) else None


def write_args(model: ModelConfig) -> dict[str, Any]:
    """Arguments with which Megatron core makes `model`.

    Sizes of the layout and of samples are left to the caller. Raises CheckpointError naming what
    core cannot express.
    """
    _check_writable(model)
    scaling = model.rope_scaling
    linear = scaling.factor if scaling is not None and scaling.kind == "linear" else None
    llama3 = scaling.factor if scaling is not None and scaling.kind == "llama3" else None
    window = model.attention_window
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.num_kv_heads != model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.max_seq_length,
        "position_embedding_type": "learned_absolute"
        if model.position == "learned"
        else model.position,
        "add_position_embedding": True,
        "rotary_base": int(model.rope_theta) if model.rope_theta % 1 == 0 else model.rope_theta,
        "rotary_percent": model.rope_fraction,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": linear,
        "use_rope_scaling": llama3 is not None,
        "rope_scaling_factor": llama3 or 8.0,
        "window_size": None if window is None else (window - 1, 0),
        "normalization": "LayerNorm" if model.norm == "layernorm" else "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "qk_layernorm": model.qk_norm,
        "swiglu": model.activation == "swiglu",
        "squared_relu": False,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "add_bias_linear": model.mlp_bias,
        "add_qkv_bias": model.qkv_bias,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "num_experts": None,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": model.vocab_multiple,
        "transformer_impl": "local",
        "ckpt_format": "torch",
    }


def _check_writable(model: ModelConfig) -> None:
    default = RopeScaling(kind="llama3", factor=8.0)
    scaling = model.rope_scaling
    if scaling is not None:
        default = default.model_copy(update={"kind": scaling.kind, "factor": scaling.factor})
    problems = {
        f"activation={model.activation}": model.activation not in ("gelu", "gelu_tanh", "swiglu"),
        "activation=gelu_tanh without biases": model.activation == "gelu_tanh"
        and not model.mlp_bias,
        f"position={model.position}": model.position == "alibi",
        "parallel_residual": model.parallel_residual,
        "embedding_norm": model.embedding_norm,
        "qk_norm with norm=layernorm": model.qk_norm and model.norm == "layernorm",
        f"attn_out_bias={model.attn_out_bias} with mlp_bias={model.mlp_bias}": model.attn_out_bias
        != model.mlp_bias,
        "mlp_bias without qkv_bias": model.mlp_bias and not model.qkv_bias,
        f"rope_scaling={scaling!r}": scaling is not None and scaling != default,
    }
    for problem, there in problems.items():
        if there:
            raise CheckpointError(f"Megatron-LM has nothing for a model with {problem}")
