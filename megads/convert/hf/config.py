"""config.json of Hugging Face models to our ModelConfig and back. Pure: no torch.

Keys that change nothing of what a model computes (caches, classification heads, generation) are
not looked at.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megads.config.model import ModelConfig
from megads.convert.hf.architectures import ARCHITECTURES, REQUIRED, Architecture, Key
from megads.convert.hf.positions import (
    Settings,
    read_rope,
    read_window,
    write_rope,
    write_window,
)
from megads.errors import CheckpointError

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are no part of a ModelConfig, but should not get lost."""


def read_config(settings: Settings) -> tuple[Architecture, ModelConfig]:
    """What config.json says. Raises CheckpointError naming what cannot be represented."""
    found = find_architecture(settings)
    for key in ("quantization_config", "per_layer_config"):
        if settings.get(key):
            raise CheckpointError(f"{key} is not supported; convert an ordinary model")
    for key, value in found.needs.items():
        if settings.get(key, value) != value:
            raise CheckpointError(
                f"{found.model_type} with {key}={settings[key]!r} is not supported, only {value!r}"
            )
    fields: dict[str, Any] = dict(found.fixed)
    for known in found.keys:
        fields |= dict.fromkeys(known.fields, _value(settings, known))
    for key, name in found.same.items():
        if settings.get(key) not in (None, fields[name]):
            raise CheckpointError(
                f"{found.model_type} with {key}={settings[key]!r} is not supported, only "
                f"{name}={fields[name]!r}"
            )
    if found.activation:
        given = settings.get(*found.activation)
        if not isinstance(given, str) or given not in found.activations:
            raise CheckpointError(
                f"{found.activation[0]}={given!r} is not supported; known: "
                f"{', '.join(found.activations)}"
            )
        fields["activation"] = found.activations[given]
    if found.rope:
        fields |= read_rope(settings, found.rope)
    try:
        model = ModelConfig(name=found.model_type, **fields)
        if found.window:
            window = read_window(settings, found.window, model.num_layers)
            model = ModelConfig.model_validate(model.model_dump() | {"attention_window": window})
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError("; ".join(problems)) from None
    return found, model


def find_architecture(settings: Settings) -> Architecture:
    """By `model_type`. Raises CheckpointError naming an architecture that is not known."""
    kind = settings.get("model_type")
    for known in ARCHITECTURES:
        if known.model_type == kind:
            return known
    classes = settings.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else "this architecture"
    raise CheckpointError(
        f"{name} (model_type {kind!r}) is not supported; known: "
        f"{', '.join(a.model_type for a in ARCHITECTURES)}"
    )


def choose_architecture(model: ModelConfig) -> Architecture:
    """The one that `model.name` is, if it can hold the model, else the first that can.

    Raises CheckpointError saying what keeps the model out of each.
    """
    misfits = {known.model_type: known.misfits(model) for known in ARCHITECTURES}
    fitting = [known for known in ARCHITECTURES if not misfits[known.model_type]]
    if fitting:
        return next((known for known in fitting if known.model_type == model.name), fitting[0])
    nearest = sorted(misfits.items(), key=lambda item: len(item[1]))
    listed = "; ".join(f"{kind}: {', '.join(wrong)}" for kind, wrong in nearest)
    raise CheckpointError(f"no architecture of Hugging Face's has this model. Misfits: {listed}")


def write_config(known: Architecture, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json for transformers 4 and 5; `dtype` is the name of the weights' type."""
    data: dict[str, Any] = {"model_type": known.model_type, "architectures": [known.writes]}
    data |= dict.fromkeys(TOKEN_IDS) | dict(known.needs)
    data |= {key.name: getattr(model, key.fields[0]) for key in known.keys}
    data |= {key: getattr(model, name) for key, name in known.same.items()}
    if known.activation:
        named = {ours: theirs for theirs, ours in reversed(list(known.activations.items()))}
        data[known.activation[0]] = named[model.activation]
    if known.rope:
        data |= write_rope(model, known.rope)
    if known.window:
        data |= write_window(model, known.window)
    return data | {"torch_dtype": dtype}


def _value(settings: Settings, key: Key) -> Any:
    if key.instead is not None and settings.get(key.instead) is not None:
        return settings[key.instead]
    for name in (key.name, *key.also):
        if name in settings:
            return settings[name]
    if key.default is REQUIRED:
        raise CheckpointError(f"it does not say {key.name}")
    return key.default
