"""The settings of GPT-NeoX: its YAML files, and the model they describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from megads.config.model import ModelConfig
from megads.errors import CheckpointError

_NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    "norm": (None, "layernorm", "rmsnorm"),
    "pos_emb": (None, "learned", "rotary", "alibi", "none"),
    "activation": (None, "gelu", "relu", "swiglu", "geglu"),
    "mlp_type": (None, "regular", "llama"),
    "gpt_j_tied": (None, False),
    "use_qk_layernorm": (None, False),
    "opt_pos_emb_offset": (None, 0),
    "moe_num_experts": (None, 0, 1),
    "use_mup": (None, False),
    "te_layernorm_mlp": (None, False),
    "te_mha": (None, False),
    "te_fp8_mha": (None, False),
    "openai_gelu": (None, False),
    "onnx_safe": (None, False),
}
"""Settings that decide what the model computes, and the values of them that megads has."""
_ATTENTION = ("global", "flash")


def read_settings(folder: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run whose checkpoint is in `folder`, with `_` for `-`.

    They are in the YAML files that GPT-NeoX stores with the checkpoint, else in those beside it;
    `args` are the few in the rank's own file. Raises CheckpointError if there are none, or if they
    contradict each other.
    """
    files = _yaml_files(folder / "configs") or _yaml_files(folder) or _yaml_files(folder.parent)
    if not files:
        raise CheckpointError(
            f"{folder} has no configs/*.yml: copy there the YAML files the model was trained with"
        )
    settings: dict[str, Any] = {}
    for path in files:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} is no table of settings")
        for key, value in content.items():
            _merge(settings, str(key).replace("-", "_"), value, path)
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        if key in args:
            _merge(settings, key, args[key], folder)
    return settings


def precision_of(settings: Mapping[str, Any]) -> torch.dtype | None:
    """The type the model computed in, narrower than fp32; None: fp32, or not said."""
    name = settings.get("precision")
    if name is None:
        for section, kind in (("fp16", "fp16"), ("bf16", "bfloat16")):
            given = settings.get(section)
            if isinstance(given, Mapping) and given.get("enabled"):
                name = given.get("type", kind)
    return _TYPES.get(str(name))


_TYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def _yaml_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.yml")), *sorted(folder.glob("*.yaml"))]


def _merge(settings: dict[str, Any], key: str, value: Any, path: Path) -> None:
    if settings.setdefault(key, value) != value:
        raise CheckpointError(f"{path}: {key} is {value}, elsewhere it is {settings[key]}")


def model_config(
    settings: Mapping[str, Any], *, ffn_hidden_size: int, vocab_size: int, path: Path
) -> ModelConfig:
    """The model that `settings` describe; the two sizes are those of its tensors.

    (GPT-NeoX rounds the first, and takes its `intermediate_size` as three times a gated one's.)
    Raises CheckpointError naming a setting that megads does not have; `path` is the checkpoint.
    """
    _refuse(settings, path)
    get = settings.get
    rms = get("norm") == "rmsnorm"
    eps = get("rms_norm_epsilon", 1e-8) if rms else get("layernorm_epsilon", 1e-5)
    heads = get("num_attention_heads")
    attention, mlp = get("use_bias_in_attn_linear", True), get("use_bias_in_mlp", True)
    llama = get("mlp_type") == "llama"
    if get("gpt_j_residual") and (llama or not mlp):
        raise CheckpointError(
            f"{path}: with gpt_j_residual and no biases in the MLP, GPT-NeoX leaves the attention "
            f"out; megads has no such model"
        )
    try:
        return ModelConfig(
            name="gpt-neox",
            num_layers=get("num_layers"),
            hidden_size=get("hidden_size"),
            num_attention_heads=heads,
            num_kv_heads=get("num_kv_heads") or heads,
            ffn_hidden_size=ffn_hidden_size,
            vocab_size=vocab_size,
            vocab_multiple=get("make_vocab_size_divisible_by", 128),
            max_seq_length=get("max_position_embeddings") or get("seq_length"),
            norm="rmsnorm" if rms else "layernorm",
            norm_eps=float(eps),
            activation=_activation(settings),
            position=_POSITIONS[get("pos_emb") or "learned"],
            rope_theta=float(get("rotary_emb_base", 10000)),
            rope_fraction=float(get("rotary_pct", 1.0)),
            qkv_bias=attention,
            attn_out_bias=attention,
            mlp_bias=mlp and not llama,
            parallel_residual=bool(get("gpt_j_residual", False)),
            tie_embeddings=not get("no_weight_tying", False),
            hidden_dropout=float(get("hidden_dropout") or 0.0),
            attention_dropout=float(get("attention_dropout") or 0.0),
            init_std=float(get("init_method_std", 0.02)),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the settings make no model: {error}") from error


_POSITIONS: Mapping[str, Any] = {
    "learned": "learned",
    "rotary": "rope",
    "alibi": "alibi",
    "none": "none",
}


def _activation(settings: Mapping[str, Any]) -> Any:
    if settings.get("mlp_type") == "llama":
        return "swiglu"
    kind = settings.get("activation") or "gelu"
    return "gelu_tanh" if kind == "gelu" and settings.get("bias_gelu_fusion") else kind


def _refuse(settings: Mapping[str, Any], path: Path) -> None:
    for name, allowed in _NOT_HERE.items():
        if settings.get(name) not in allowed:
            raise CheckpointError(f"{path}: megads has no model with {name}={settings[name]}")
    unique = settings.get("num_unique_layers")
    if unique not in (None, settings.get("num_layers")):
        raise CheckpointError(f"{path}: megads has no model with num_unique_layers={unique}")
    window, length = settings.get("sliding_window_width"), settings.get("max_position_embeddings")
    if window is not None and not (length and window >= length):
        raise CheckpointError(f"{path}: megads does not convert sliding_window_width={window}")
    tuning = settings.get("soft_prompt_tuning") or {}
    if tuning.get("enabled", False):
        raise CheckpointError(f"{path}: megads has no model with soft_prompt_tuning")
    kinds = {kind for group in settings.get("attention_config") or () for kind in _flat(group)}
    if other := sorted(kinds - set(_ATTENTION)):
        raise CheckpointError(f"{path}: megads has no model with attention_config {other[0]}")


def _flat(group: Any) -> list[str]:
    """Names of the kinds of attention: `[["global", "local"], 6]` or plain names, one a layer."""
    if isinstance(group, str):
        return [group]
    return list(group[0]) if isinstance(group, list) and group else []
