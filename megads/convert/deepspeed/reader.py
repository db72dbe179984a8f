"""Megatron-DeepSpeed in: bigscience's fork (BLOOM) and deepspeedai's (GPT, LLaMA).

Settings are those stored in the files of the ranks. The forks are told apart by them: only
deepspeedai's knows a `normalization`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megads.config.model import ModelConfig
from megads.convert.deepspeed.files import Opened, Shards, find_folder, model_files
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
from megads.convert.deepspeed.universal import UniversalShards, is_universal
from megads.convert.source import ReadOptions, Source, precision_of
from megads.convert.vocabulary import vocabulary
from megads.errors import CheckpointError
from megads.models.families import param_specs

_NAMES = Names("self_attention", "lm_head.weight", frozenset({"weight", "bias"}))
_PARTS: Mapping[str, str] = {
    "embedding.word.weight": "word_embeddings.weight",
    "embedding.position.weight": "position_embeddings.weight",
    "embedding.norm.weight": "word_embeddings.norm.weight",
    "embedding.norm.bias": "word_embeddings.norm.bias",
    "final_norm.weight": "weight",
    "final_norm.bias": "bias",
    "head.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attention.query_key_value",
    "attn.out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_POSITIONS = {1: "rope", 2: "learned", 3: "alibi"}
"""bigscience's PositionEmbeddingType."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_NOT_HERE: Mapping[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
    "squared_relu": False,
    "glu_activation": (None, "swiglu", "geglu"),
    "normalization": (None, "layernorm", "rmsnorm"),
    "num_experts": ([1], 1, None),
    "mlp_type": (None, "standard"),
}
"""Settings that decide what the model computes, and the values of them that megads has."""


def holds(path: Path) -> bool:
    """Whether there is a checkpoint of Megatron-DeepSpeed, in layer files or universal."""
    with contextlib.suppress(CheckpointError):
        return is_universal(_universal_folder(path, None))
    with contextlib.suppress(CheckpointError):
        return _has_layers(find_folder(path, None, _has_layers, pointer="latest"))
    return False


def open_source(path: Path, options: ReadOptions) -> Source:
    """The checkpoint of step `options.step`, or the latest.

    Raises CheckpointError for missing files and settings that megads does not have, by name.
    """
    opened = Opened()
    try:
        folder = find_folder(path, options.step, _has_layers, pointer="latest")
    except CheckpointError as error:
        try:
            folder = _universal_folder(path, options.step)
        except CheckpointError:
            raise error from None
    states = opened.table(_settings_file(folder))
    stored = states.get("args", {})
    args = stored if isinstance(stored, Mapping) else vars(stored)
    if missing := [name for name in _NEEDED if args.get(name) is None]:
        raise CheckpointError(f"{_settings_file(folder)} does not say {', '.join(missing)} (args)")
    version = float(states.get("checkpoint_version", 3.0))
    if version < 2.0:
        raise CheckpointError(
            f"{folder}: checkpoint_version {version:g} orders query, key and value in another way"
        )
    tp = int(args.get("tensor_model_parallel_size", 1))
    shards: Shards
    if is_universal(folder):
        shards = UniversalShards(folder, tp, opened, optimizer=options.optimizer)
    else:
        shards = PipelineShards(folder, opened, optimizer=options.optimizer)
        if shards.tp != tp:
            raise CheckpointError(
                f"{folder} has layer files of {shards.tp} tensor-parallel ranks, the run had {tp}"
            )
    return _source(folder, options, states, args, shards)


def _source(
    folder: Path,
    options: ReadOptions,
    states: Mapping[str, Any],
    args: Mapping[str, Any],
    shards: Shards,
) -> Source:
    places = find_places(folder, shards, _NAMES, int(args["num_layers"]))
    info = states.get("universal_checkpoint_info") or states.get("checkpoint_info") or {}
    padded = shards.size(places.embedding, "word_embeddings.weight", 0)
    words = vocabulary(folder, options, info.get("original_vocab_size"), padded)
    model = model_config(args, words.size, _settings_file(folder))
    qkv: Join = "thirds" if options.qkv == "thirds" else "grouped"
    notes = words.notes
    if options.qkv == "auto" and "normalization" in args:
        qkv = "grouped" if model.num_kv_heads < model.num_attention_heads else "thirds"
        if qkv == "thirds":
            notes += (
                "query, key and value are read as thirds, as Megatron-DeepSpeed writes them since "
                "December 2024; choose --qkv grouped for older checkpoints",
            )
    gated: Join = "up_gate" if args.get("glu_activation") else "gate_up"
    slots = _slots(folder, model, places, qkv, gated)
    source = DeepSpeedSource("megatron-deepspeed", folder, model, shards, slots)
    source.trained = trained(states, args.get("consumed_train_samples"), args.get("seq_length"))
    if options.optimizer and len(source.kinds) == 1 and states.get("optimizer"):
        notes += ("the optimizer's state is left out: it is stored without names",)
    source.describe(notes, precision_of(args))
    return source


def model_config(args: Mapping[str, Any], vocab_size: int, path: Path) -> ModelConfig:
    """The model that `args` describe; `path` is the file they are from.

    Raises CheckpointError naming a setting that megads does not have.
    """
    for name, allowed in _NOT_HERE.items():
        value = args.get(name, allowed[0] if isinstance(allowed, tuple) else allowed)
        if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            raise CheckpointError(f"{path}: megads has no model with {name}={value}")
    biases = bool(args.get("add_bias_linear", True))
    rms = args.get("normalization") == "rmsnorm"
    heads = int(args["num_attention_heads"])
    try:
        return ModelConfig(
            name="megatron-deepspeed",
            num_layers=args["num_layers"],
            hidden_size=args["hidden_size"],
            num_attention_heads=heads,
            num_kv_heads=args.get("num_key_value_heads") or heads,
            head_dim=args.get("kv_channels"),
            ffn_hidden_size=args.get("ffn_hidden_size"),
            vocab_size=vocab_size,
            vocab_multiple=args.get("make_vocab_size_divisible_by", 128),
            max_seq_length=args["max_position_embeddings"],
            norm="rmsnorm" if rms else "layernorm",
            norm_eps=args.get("layernorm_epsilon", 1e-5),
            activation=_activation(args, path),
            position=_position(args, path),
            rope_theta=args.get("rope_theta", 10000.0),
            rope_fraction=args.get("rotary_percent", 1.0),
            qkv_bias=biases,
            attn_out_bias=biases,
            mlp_bias=biases,
            embedding_norm=bool(args.get("embed_layernorm", False)),
            tie_embeddings=not args.get("untie_embeddings_and_output_weights", False),
            hidden_dropout=args.get("hidden_dropout", 0.0),
            attention_dropout=args.get("attention_dropout", 0.0),
            init_std=args.get("init_method_std", 0.02),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the settings make no model: {error}") from error


def _activation(args: Mapping[str, Any], path: Path) -> Any:
    if args.get("swiglu"):
        return "swiglu"
    gated = args.get("glu_activation")
    if gated == "geglu" and args.get("openai_gelu"):
        raise CheckpointError(f"{path}: megads has no geglu with openai_gelu=True")
    if gated:
        return gated
    tanh = args.get("bias_gelu_fusion") or args.get("openai_gelu")
    return "gelu_tanh" if tanh else "gelu"


def _position(args: Mapping[str, Any], path: Path) -> Any:
    kind = args.get("position_embedding_type")
    if kind is None:
        if args.get("use_rotary_position_embeddings"):
            return "rope"
        return "learned" if args.get("add_position_embedding", True) else "none"
    number = getattr(kind, "args", (kind,))[0]
    if number not in _POSITIONS:
        raise CheckpointError(f"{path}: megads does not know position_embedding_type={number}")
    return _POSITIONS[number]


def _slots(
    folder: Path, model: ModelConfig, places: Places, qkv: Join, gated: Join
) -> dict[str, Slot]:
    if not model.tie_embeddings and places.head is None:
        raise CheckpointError(f"{folder}: the layer with lm_head.weight is missing")
    joins: dict[str, Join] = {
        "attn.qkv.weight": qkv,
        "attn.qkv.bias": qkv,
        "attn.out.weight": "rows",
        "mlp.up.weight": gated if model.gated else "columns",
        "mlp.up.bias": gated if model.gated else "columns",
        "mlp.down.weight": "rows",
        "embedding.word.weight": "columns",
        "head.weight": "columns",
    }
    slots = {}
    for spec in param_specs(model):
        name, key = spec.name, _PARTS.get(spec.name)
        layer = places.embedding if spec.edge == "first" else places.norm
        if spec.layer is not None:
            layer = places.blocks[spec.layer]
            name = spec.name.split(".", 2)[2]
            part, _, kind = name.rpartition(".")
            key = f"{_PARTS[part]}.{kind}"
        elif name == "head.weight":
            layer = places.head if places.head is not None else layer
        slots[spec.name] = Slot(layer, (str(key),), joins.get(name, "copies"))
    return slots


def _settings_file(folder: Path) -> Path:
    files = model_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no mp_rank_*_model_states.pt, where the settings are")
    return files[min(files)]


def _has_layers(folder: Path) -> bool:
    """Whether there are layer files; the first layer of Megatron-DeepSpeed has none."""
    places = layer_files(folder)
    return bool(places) and (0, 0) not in places


def _universal_folder(path: Path, step: int | None) -> Path:
    return find_folder(path, step, is_universal, pointer="latest_universal", suffix="_universal")
