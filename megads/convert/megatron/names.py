"""Names of parameters in Megatron-LM's files, and the canonical ones.

The names used here are those of Megatron core with the layer's number in the whole model; older
files are renamed when they are read.
"""

from __future__ import annotations

import re

_ENDS = {
    "embedding.word": ("embedding.word_embeddings",),
    "embedding.position": ("embedding.position_embeddings",),
    "embedding.norm": ("embedding.word_embeddings.norm",),
    "final_norm": ("decoder.final_layernorm",),
    "head": ("output_layer",),
}
_BLOCK = {
    "attn.qkv": ("self_attention.linear_qkv",),
    "attn.q_norm": ("self_attention.q_layernorm",),
    "attn.k_norm": ("self_attention.k_layernorm",),
    "attn.out": ("self_attention.linear_proj",),
    "mlp.up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
}
_NORMS = {
    "attn_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
}
"""A norm is a module of its own, or part of Transformer Engine's linear layer after it."""

_OLD = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "input_norm": "input_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def core_names(name: str) -> tuple[str, ...]:
    """What Megatron core may call the canonical parameter `name`; its own spelling first."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return tuple(f"{end}.{kind}" for end in _ENDS[module])
    _, layer, part = module.split(".", 2)
    ends = _NORMS[part] if part in _NORMS else tuple(f"{end}." for end in _BLOCK[part])
    return tuple(f"decoder.layers.{layer}.{end}{kind}" for end in ends)


def layer_of(name: str) -> int | None:
    """The layer's number in a core name, if it is of a layer."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def with_layer(name: str, layer: int) -> str:
    """A layer's core name with another number."""
    match = _LAYER.fullmatch(name)
    return f"decoder.layers.{layer}.{match[2]}" if match else name


def stacked(name: str) -> str:
    """A layer's core name without the number, as tensors of all layers together have it."""
    match = _LAYER.fullmatch(name)
    return f"decoder.layers.{match[2]}" if match else name


def from_old(name: str) -> str:
    """The core name of a parameter as files before core call it, inside `language_model`."""
    name = re.sub(r"^(encoder|transformer)\.final_(layer)?norm\.", "decoder.final_layernorm.", name)
    match = re.fullmatch(r"(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return name
    return f"decoder.layers.{match[1]}.{_OLD.get(match[2], match[2])}.{match[3]}"


def is_parameter(name: str) -> bool:
    """Whether a tensor of the model's state is trained; frequencies of the rotation are not."""
    return not name.endswith(("_extra_state", "inv_freq"))
