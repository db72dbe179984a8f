"""Rotary positions and sliding windows in config.json, both ways. Pure: no torch.

transformers 5 keeps all rotary settings in `rope_parameters`; 4 has `rope_theta` and `rope_scaling`
beside one another, GPT-NeoX's under names of their own. Both are read. Written are the names of 4,
which 5 reads as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megads.config.model import ModelConfig
from megads.errors import CheckpointError

Settings = Mapping[str, Any]
RopeNames = Literal["llama", "gpt_neox"]
WindowNames = Literal["mistral", "qwen"]


def read_rope(settings: Settings, names: RopeNames) -> dict[str, Any]:
    """The rotary fields of ModelConfig. Raises CheckpointError for what they cannot say."""
    given: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = settings.get(key) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise CheckpointError(f"{key} is {value!r}; only one for all layers can be converted")
        given |= value
    neox = names == "gpt_neox"
    theta = settings.get("rope_theta", 10000.0)
    theta = given.get("rope_theta", settings.get("rotary_emb_base", theta) if neox else theta)
    fraction = settings.get("partial_rotary_factor", 0.25 if neox else 1.0)
    fraction = settings.get("rotary_pct", fraction) if neox else fraction
    fraction = given.get("partial_rotary_factor", fraction)
    if not neox and fraction != 1.0:
        raise CheckpointError(f"partial_rotary_factor={fraction} is not known to this architecture")
    return {
        "position": "rope",
        "rope_theta": theta,
        "rope_fraction": fraction,
        "rope_scaling": _read_scaling(settings, given),
    }


def _read_scaling(settings: Settings, given: Settings) -> dict[str, Any] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(
            f"rope_type={kind!r} is not supported; known: default, linear, llama3"
        )
    wanted = {"factor": "factor"}
    if kind == "llama3":
        wanted |= {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
        original = "original_max_position_embeddings"
        fallback = given.get(original, settings.get("max_position_embeddings"))
        given = {**given, original: settings.get(original, fallback)}
        wanted["original_max_seq_length"] = original
    missing = [key for key in wanted.values() if key not in given]
    if missing:
        raise CheckpointError(f"rope_type={kind!r} lacks {', '.join(missing)}")
    return {"kind": kind} | {field: given[key] for field, key in wanted.items()}


def write_rope(model: ModelConfig, names: RopeNames) -> dict[str, Any]:
    """The keys that say what `read_rope` reads."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling is not None:
        given = model.rope_scaling
        scaling = {"rope_type": given.kind, "factor": float(given.factor)}
        if given.kind == "llama3":
            scaling |= {
                "low_freq_factor": float(given.low_freq_factor),
                "high_freq_factor": float(given.high_freq_factor),
                "original_max_position_embeddings": given.original_max_seq_length,
            }
    base = {"rope_scaling": scaling}
    if names == "gpt_neox":
        return base | {"rotary_emb_base": model.rope_theta, "rotary_pct": model.rope_fraction}
    return base | {"rope_theta": model.rope_theta}


def read_window(settings: Settings, names: WindowNames, num_layers: int) -> int | None:
    """The window that all layers have, None for none. Raises CheckpointError if they differ."""
    default = 4096  # of both architectures, when the file does not say
    window: int | None = settings.get("sliding_window", default)
    windowed = num_layers
    if names == "qwen":
        first = settings.get("max_window_layers", 28)
        windowed = max(num_layers - first, 0) if settings.get("use_sliding_window", False) else 0
    types = settings.get("layer_types")
    if isinstance(types, list) and window is not None:
        windowed = sum(kind == "sliding_attention" for kind in types)
        if len(types) != num_layers or windowed + types.count("full_attention") != num_layers:
            raise CheckpointError(f"layer_types {sorted(set(types))} are not known, or too few")
    if window is None or windowed == 0:
        return None
    if windowed != num_layers:
        raise CheckpointError(
            f"sliding_window={window} is for {windowed} of {num_layers} layers; only one for all "
            "layers, or none, can be converted"
        )
    return window


def write_window(model: ModelConfig, names: WindowNames) -> dict[str, Any]:
    """The keys that say what `read_window` reads."""
    window = model.attention_window
    if names == "mistral":
        return {"sliding_window": window}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window is not None else model.num_layers,
    }
