"""A preset is the model that the published config.json of that name describes."""

from __future__ import annotations

from typing import Any

import pytest

from megads.checkpoint.manifest import model_differences
from megads.config.compose import compose
from megads.convert.hf.config import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
# What the publishers' files on the Hub say of the model, as of the names' first release.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-7b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048}
    | {"rms_norm_eps": 1e-6},
    "llama2-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000}
    | {"max_position_embeddings": 4096},
    "llama3-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    | {"max_position_embeddings": 8192, "rope_theta": 500000.0},
    "mistral-7b": LLAMA
    | {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen2-7b": LLAMA
    | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}
    | {"rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False},
    "qwen3-8b": LLAMA
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    | {"rope_theta": 1000000.0, "sliding_window": None},
    "pythia-1.4b": {"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 2048}
    | {"intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"vocab_size": 50304, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5}
    | {"rotary_pct": 0.25, "use_parallel_residual": True, "tie_word_embeddings": False},
    "bloom-560m": {"model_type": "bloom", "n_embed": 1024, "n_layer": 24}
    | {"num_attention_heads": 16, "vocab_size": 250880, "layer_norm_epsilon": 1e-5},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_converted_model_is_its_preset(name: str) -> None:
    _, model = read_config(PUBLISHED[name])
    preset = compose([f"model={name}"]).model
    assert model_differences(model, preset) == []
    other = preset.model_copy(
        update={"norm_eps": 1e-3, "tie_embeddings": not preset.tie_embeddings}
    )
    assert len(model_differences(model, other)) == 2
