"""GPT-NeoX in: checkpoints of its pipeline engine, or of one rank's layers in a row."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from megads.config.model import ModelConfig
from megads.convert.deepspeed.files import Opened, find_folder, model_files
from megads.convert.deepspeed.join import (
    DeepSpeedSource,
    Join,
    Names,
    Places,
    Slot,
    find_places,
    trained,
)
from megads.convert.deepspeed.layers import PipelineShards, layer_files
from megads.convert.neox.config import model_config, precision_of, read_settings
from megads.convert.source import ReadOptions, Source
from megads.convert.vocabulary import vocabulary
from megads.errors import CheckpointError
from megads.models.families import param_specs

_NAMES = Names(
    "attention", "final_linear.weight", frozenset({"norm.weight", "norm.bias", "norm.scale"})
)
_DOWN = ("mlp.linear2.weight", "mlp.dense_4h_to_h.weight", "mlp.w2.weight")
_LLAMA = "mlp.w1"
"""The gate of the older gated MLP; `w3` is the other half and `w2` the way down."""


def holds(path: Path) -> bool:
    """Whether there is a checkpoint of GPT-NeoX, whose first layer is the embedding."""
    with contextlib.suppress(CheckpointError):
        return _is_neox(find_folder(path, None, _is_neox, pointer="latest"))
    return False


def open_source(path: Path, options: ReadOptions) -> Source:
    """The checkpoint of step `options.step`, or the latest.

    Raises CheckpointError for missing files and settings that megads does not have, by name.
    """
    folder = find_folder(path, options.step, _is_neox, pointer="latest")
    opened = Opened()
    files = model_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no mp_rank_*_model_states.pt")
    states = opened.table(files[min(files)])
    args = states.get("args") or {}
    settings = read_settings(folder, args if isinstance(args, Mapping) else vars(args))
    if not isinstance(settings.get("num_layers"), int):
        raise CheckpointError(f"{folder}: its settings do not say num_layers")
    shards = PipelineShards(folder, opened, optimizer=options.optimizer)
    places = find_places(folder, shards, _NAMES, settings["num_layers"])
    keys = shards.layers[places.blocks[0]]
    if f"{_LLAMA}.weight" in keys:
        settings.setdefault("mlp_type", "llama")
    down = next((key for key in _DOWN if key in keys), _DOWN[0])
    padded = shards.size(places.embedding, "word_embeddings.weight", 0)
    words = vocabulary(folder, options, None, padded)
    model = model_config(
        settings,
        ffn_hidden_size=shards.size(places.blocks[0], down, 1),
        vocab_size=words.size,
        path=folder,
    )
    slots = _slots(folder, model, places, keys, _qkv(folder, model, options))
    source = DeepSpeedSource("gpt-neox", folder, model, shards, slots)
    source.trained = trained(states, None, settings.get("seq_length"))
    notes = words.notes
    if model.num_kv_heads < model.num_attention_heads:
        notes += (
            "grouped KV heads are taken as GPT-NeoX stores them since November 2024; before, it "
            "stored the same shapes in another order, which is not read",
        )
    if options.optimizer and len(source.kinds) == 1 and states.get("optimizer"):
        notes += ("the optimizer's state is left out: it is stored without names",)
    source.describe(notes, precision_of(settings))
    return source


def _qkv(folder: Path, model: ModelConfig, options: ReadOptions) -> Join:
    """Per head, but plain with grouped KV heads (in another order before 2025, as large)."""
    fewer = model.num_kv_heads < model.num_attention_heads
    if fewer and options.qkv == "grouped":
        raise CheckpointError(
            f"{folder}: GPT-NeoX never stored num_kv_heads={model.num_kv_heads} of "
            f"{model.num_attention_heads} heads by groups; leave --qkv out"
        )
    if options.qkv == "auto":
        return "thirds" if fewer else "grouped"
    return options.qkv


def _slots(
    folder: Path, model: ModelConfig, places: Places, keys: frozenset[str], qkv: Join
) -> dict[str, Slot]:
    if not model.tie_embeddings and places.head is None:
        raise CheckpointError(f"{folder}: the layer with final_linear.weight is missing")
    # Parallel residuals are reduced over the ranks after each has added its own bias.
    bias: Join = "sums" if model.parallel_residual else "copies"
    scale = "scale" if "input_layernorm.scale" in keys else "weight"
    current = "mlp.linear2.weight" in keys
    up, down = ("linear1", "linear2") if current else ("dense_h_to_4h", "dense_4h_to_h")
    gated: Join = "up_gate" if model.gated else "columns"
    parts: Mapping[str, tuple[tuple[str, ...], Join]] = {
        "attn_norm.weight": ((f"input_layernorm.{scale}",), "copies"),
        "attn_norm.bias": (("input_layernorm.bias",), "copies"),
        "attn.qkv.weight": (("attention.query_key_value.weight",), qkv),
        "attn.qkv.bias": (("attention.query_key_value.bias",), qkv),
        "attn.out.weight": (("attention.dense.weight",), "rows"),
        "attn.out.bias": (("attention.dense.bias",), bias),
        "mlp_norm.weight": ((f"post_attention_layernorm.{scale}",), "copies"),
        "mlp_norm.bias": (("post_attention_layernorm.bias",), "copies"),
        "mlp.up.weight": ((f"mlp.{up}.weight",), gated),
        "mlp.up.bias": ((f"mlp.{up}.bias",), gated),
        "mlp.down.weight": ((f"mlp.{down}.weight",), "rows"),
        "mlp.down.bias": ((f"mlp.{down}.bias",), bias),
    }
    if f"{_LLAMA}.weight" in keys:
        halves = (f"{_LLAMA}.weight", "mlp.w3.weight")
        parts = {
            **parts,
            "mlp.up.weight": (halves, "columns"),
            "mlp.down.weight": (("mlp.w2.weight",), "rows"),
        }
    edges: Mapping[str, tuple[int | None, str, Join]] = {
        "embedding.word.weight": (places.embedding, "word_embeddings.weight", "columns"),
        "embedding.position.weight": (places.embedding, "position_embeddings.weight", "copies"),
        "final_norm.weight": (places.norm, f"norm.{scale}", "copies"),
        "final_norm.bias": (places.norm, "norm.bias", "copies"),
        "head.weight": (places.head, "final_linear.weight", "columns"),
    }
    slots = {}
    for spec in param_specs(model):
        if spec.layer is not None:
            found, join = parts[spec.name.split(".", 2)[2]]
            slots[spec.name] = Slot(places.blocks[spec.layer], found, join)
        else:
            layer, key, join = edges[spec.name]
            slots[spec.name] = Slot(layer or 0, (key,), join)
    return slots


def _is_neox(folder: Path) -> bool:
    """Its first layer has a file; without the pipeline engine, its settings lie beside."""
    places = layer_files(folder)
    if places:
        return (0, 0) in places
    return bool(model_files(folder)) and any((folder / "configs").glob("*.y*ml"))
