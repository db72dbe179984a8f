"""Every choice of a model that Megatron-LM's arguments can hold, off its default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from megads.config.model import ModelConfig, RopeScaling
from megads.convert.run import convert, open_checked
from megads.convert.source import ReadOptions, WriteOptions
from tests.convert.hf_models import InMemory
from tests.convert.megatron_cases import assert_same, canonical, random_tensors

GPT = ModelConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=2,
    head_dim=6,
    ffn_hidden_size=20,
    vocab_size=21,
    vocab_multiple=4,
    max_seq_length=12,
    norm_eps=3e-4,
    activation="gelu",
    attention_window=5,
    hidden_dropout=0.25,
    attention_dropout=0.125,
    init_std=0.5,
)
LINEAR = GPT.model_copy(
    update={
        "num_kv_heads": 1,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": 12345.0,
        "rope_fraction": 1 / 3,
        "rope_scaling": RopeScaling(kind="linear", factor=2.5),
        "qkv_bias": False,
        "attn_out_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "tie_embeddings": False,
    }
)
LLAMA3 = LINEAR.model_copy(
    update={
        "rope_theta": 500000.5,
        "rope_scaling": RopeScaling(kind="llama3", factor=32.0),
        "qkv_bias": True,
    }
)
NONE = GPT.model_copy(update={"position": "none", "activation": "gelu_tanh"})
MODELS = {"gpt": GPT, "linear": LINEAR, "llama3": LLAMA3, "none": NONE}
NOT_IN_MEGATRON = {"name", "parallel_residual", "embedding_norm", "init_scale_output"}


def test_no_field_is_at_its_default_everywhere() -> None:
    for name, field in ModelConfig.model_fields.items():
        if name in NOT_IN_MEGATRON or field.default is PydanticUndefined:
            continue
        assert any(getattr(model, name) != field.default for model in MODELS.values()), name
    assert LINEAR.num_kv_heads != LINEAR.num_attention_heads
    assert GPT.head_dim * GPT.num_attention_heads != GPT.hidden_size


@pytest.mark.parametrize("name", MODELS)
def test_all_fields_come_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    model = MODELS[name]
    source = InMemory(model, random_tensors(model))
    target = tmp_path / "out"
    convert(source, target, "megatron-lm", WriteOptions(), lambda kind, name: None)
    result = open_checked(target, "auto", ReadOptions())
    assert result.model == model
    assert_same(canonical(result), source.tensors)
