"""What config.json and the files may say, and what is refused, by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.hf.config import read_config
from megads.convert.source import ReadOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from tests.convert.hf_models import InMemory, converted, raw_tensors
from tests.convert.test_hf_write import BLOOM, GPT, LLAMA, LLAMA3, NEOX, OPT, model_of
from tests.models.stages import random_weights

LLAMA_FILE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
QWEN2_FILE = LLAMA_FILE | {"model_type": "qwen2", "num_key_value_heads": 4}
MISTRAL_FILE = QWEN2_FILE | {"model_type": "mistral"}
NEOX_FILE = LLAMA_FILE | {"model_type": "gpt_neox"}
GPT2_FILE: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 101,
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": 32,
}
OPT_FILE = LLAMA_FILE | {"model_type": "opt", "ffn_dim": 44}
BLOOM_FILE = {
    "model_type": "bloom",
    "vocab_size": 101,
    "n_embed": 24,
    "n_layer": 2,
    "num_attention_heads": 4,
}


def read(settings: dict[str, Any], **more: Any) -> ModelConfig:
    return read_config(settings | more)[1]


def test_both_ways_to_say_rotary_positions() -> None:
    scaling = {
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    old = read(LLAMA_FILE, rope_theta=500.0, rope_scaling=scaling | {"rope_type": "llama3"})
    new = read(LLAMA_FILE, rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500.0})
    assert old == new and old.rope_theta == 500.0
    assert old.rope_scaling is not None and old.rope_scaling.model_dump() == LLAMA3 | {
        "high_freq_factor": 4.0
    }
    oldest = read(LLAMA_FILE, rope_scaling={"type": "linear", "factor": 2})
    assert oldest.rope_scaling is not None and oldest.rope_scaling.kind == "linear"
    assert oldest.rope_theta == 10000.0

    old = read(NEOX_FILE, rotary_pct=0.34, rotary_emb_base=500)
    new = read(NEOX_FILE, rope_parameters={"rope_theta": 500, "partial_rotary_factor": 0.34})
    assert old == new and (old.rope_theta, old.rope_fraction) == (500.0, 0.34)


def test_what_files_leave_out() -> None:
    """Defaults are those of transformers, and differ between architectures."""
    assert not read(LLAMA_FILE).tie_embeddings and read(GPT2_FILE).tie_embeddings
    assert read(LLAMA_FILE).num_kv_heads == 4
    assert read(MISTRAL_FILE).attention_window == 4096
    assert read(MISTRAL_FILE, sliding_window=None).attention_window is None
    assert read(QWEN2_FILE).attention_window is None
    assert read(GPT2_FILE).ffn_hidden_size == 96 and read(GPT2_FILE).activation == "gelu_tanh"
    assert read(NEOX_FILE, hidden_size=32).rope_fraction == 0.25
    assert read(BLOOM_FILE).hidden_size == 24
    with pytest.raises(CheckpointError, match="heads=4 is not a multiple of num_kv_heads=8"):
        read({k: v for k, v in MISTRAL_FILE.items() if k != "num_key_value_heads"})


def test_windows_of_all_layers_or_none() -> None:
    def window(**more: Any) -> int | None:
        return read(QWEN2_FILE, sliding_window=7, **more).attention_window

    assert window(use_sliding_window=True, max_window_layers=0) == 7
    assert window(use_sliding_window=True, max_window_layers=2) is None
    assert window(use_sliding_window=True, layer_types=["sliding_attention"] * 2) == 7
    assert window(layer_types=["full_attention"] * 2) is None
    mixed = ["full_attention", "sliding_attention"]
    for more in ({"use_sliding_window": True, "max_window_layers": 1}, {"layer_types": mixed}):
        with pytest.raises(CheckpointError, match="sliding_window=7 is for 1 of 2 layers"):
            window(**more)
    with pytest.raises(CheckpointError, match="chunked_attention"):
        window(layer_types=["chunked_attention"] * 2)


@pytest.mark.parametrize(
    ("settings", "change", "problem"),
    [
        (LLAMA_FILE, {"model_type": "gemma3"}, r"model_type 'gemma3'"),
        (LLAMA_FILE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (LLAMA_FILE, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        (LLAMA_FILE, {"rope_parameters": {"full_attention": {}}}, "only one for all layers"),
        (LLAMA_FILE, {"rope_scaling": {"type": "linear"}}, "lacks factor"),
        (LLAMA_FILE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA_FILE, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (LLAMA_FILE, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh'"),
        (LLAMA_FILE, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (GPT2_FILE, {"scale_attn_weights": False}, "scale_attn_weights=False"),
        (GPT2_FILE, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2_FILE, {"activation_function": "quick_gelu"}, "activation_function='quick_gelu'"),
        (BLOOM_FILE, {"apply_residual_connection_post_layernorm": True}, "apply_residual.*True"),
        (OPT_FILE, {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        (OPT_FILE, {"word_embed_proj_dim": 12}, "word_embed_proj_dim=12.*hidden_size=24"),
        (OPT_FILE, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (GPT2_FILE, {"n_head": 5}, "24 is not a multiple of num_attention_heads=5"),
        (LLAMA_FILE, {"num_hidden_layers": -1}, "num_layers"),
    ],
)
def test_settings_we_lack(settings: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    read(settings)
    with pytest.raises(CheckpointError, match=problem):
        read(settings, **change)


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(CheckpointError, match="does not say hidden_size"):
        read({k: v for k, v in LLAMA_FILE.items() if k != "hidden_size"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model = model_of(LLAMA)
    return converted(InMemory(model, random_weights(model)), tmp_path / "llama", "hf")


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(path: Path, **changes: Tensor | None) -> None:
    """Write the tensors anew; `__` stands for a dot, None removes."""
    tensors = raw_tensors(path)
    for name, tensor in changes.items():
        full = name.replace("__", ".")
        tensors.pop(full, None)
        if tensor is not None:
            tensors[full] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_do_not_belong(llama: Path) -> None:
    """Buffers are passed over; anything else too many, too few, or of another size is named."""
    frequencies = torch.ones(3)
    change_tensors(llama, model__layers__1__self_attn__rotary_emb__inv_freq=frequencies)
    change_tensors(llama, model__rotary_emb__inv_freq=frequencies)
    open_source(llama).check_complete()
    change_tensors(llama, model__layers__1__self_attn__gate__weight=frequencies)
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.1\.self_attn\.gate"):
        open_source(llama).check_complete()
    change_tensors(llama, model__layers__1__self_attn__gate__weight=None)
    for changes, problem in (
        ({"vocab_size": 102}, r"embed_tokens\.weight has shape \[101, 24\].*\[102, 24\]"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\.input_layernorm"),
        ({"num_hidden_layers": 10**12}, r"cannot hold 1000000000000 layers"),
        ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.q_proj\.bias"),
    ):
        before = (llama / "config.json").read_text()
        change_config(llama, **changes)
        with pytest.raises(CheckpointError, match=problem):
            open_source(llama)
        (llama / "config.json").write_text(before)
    change_tensors(llama, lm_head__weight=torch.ones(101, 24, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is of type I64"):
        open_source(llama)


def test_a_tied_head_that_is_stored(llama: Path) -> None:
    """Is fine as long as it is the embedding."""
    embedding = raw_tensors(llama)["model.embed_tokens.weight"]
    change_config(llama, tie_word_embeddings=True)
    change_tensors(llama, lm_head__weight=embedding.clone())
    (source := open_source(llama)).check_complete()
    name = "embedding.word.weight"
    assert source.origins("param", name) == ("model.embed_tokens.weight", "lm_head.weight")
    assert torch.equal(source.tensor("param", name), embedding)
    change_tensors(llama, lm_head__weight=embedding + 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding"):
        open_source(llama).tensor("param", name)


@pytest.mark.parametrize("kind", ["opt", "bloom", "neox", "llama"])
def test_names_without_the_prefix(tmp_path: Path, kind: str) -> None:
    """As in files of the bare model, and GPT-NeoX's head under its other name."""
    settings = {"opt": OPT, "bloom": BLOOM, "neox": NEOX, "llama": LLAMA}[kind]
    model = model_of(settings)
    weights = random_weights(model)
    path = converted(InMemory(model, weights), tmp_path / "hf", "hf")
    prefixes = {"opt": "model.", "bloom": "transformer.", "neox": "gpt_neox.", "llama": "model."}
    tensors = {
        name.removeprefix(prefixes[kind]).replace("embed_out", "lm_head"): tensor
        for name, tensor in raw_tensors(path).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    source = open_source(path)
    source.check_complete()
    for spec in param_specs(model):
        assert torch.equal(source.tensor("param", spec.name), weights[spec.name])


def test_damaged_files_are_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_source(llama, "hf")
    file.unlink()
    with pytest.raises(CheckpointError, match="no weights in"):
        open_source(llama)
    with pytest.raises(CheckpointError, match=r"no weights in .*pytorch_model\.bin"):
        open_source(llama, "hf")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "no file beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no file beside it"),
        ({"weight_map": {"a": 3}}, "no file beside it"),
        ({"weight_map": {"a": "part.safetensors"}}, "a is in part.safetensors, but it is not"),
        ({"weight_map": {"a": "gone.safetensors"}}, "cannot read .*gone.safetensors"),
        ({"weight_map": {}}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "holds no JSON object"),
    ],
)
def test_an_index_that_lies(llama: Path, index: Any, problem: str) -> None:
    (llama / "model.safetensors").rename(llama / "part.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=problem):
        open_source(llama)


def test_a_pickle_that_lies(tmp_path: Path) -> None:
    """One element that claims to be a matrix, something that is no tensor, something that runs."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2_FILE))
    for content, problem in (
        ({"wte.weight": torch.ones(1).expand(100_000, 100_000)}, "in a storage of 1 elements"),
        ({"wte.weight": "text"}, "'wte.weight' is a str, not a tensor"),
        ([torch.ones(1)], "holds a list, not a table of tensors"),
        ({"wte.weight": Path("x")}, "PosixPath"),
    ):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=problem):
            open_source(tmp_path)


def test_no_value_of_any_setting_surprises(llama: Path) -> None:
    """A config.json of any content is read, or refused with the file's name."""
    settings = json.loads((llama / "config.json").read_text())
    odd = [None, -1, 10**30, 1.5, "x", [1], {"a": {}}, float("nan")]
    keys = [*settings, "rope_parameters", "layer_types", "quantization_config", "architectures"]
    for kind in ("qwen2", "gpt2"):
        for key in keys:
            for value in odd:
                changed = settings | {"model_type": kind} | {key: value}
                (llama / "config.json").write_text(json.dumps(changed))
                try:
                    open_source(llama, "hf")
                except CheckpointError as error:
                    assert str(llama) in str(error)


def test_steps_are_refused(llama: Path) -> None:
    with pytest.raises(CheckpointError, match="hf, which ignores --step; leave it out"):
        open_source(llama, "auto", ReadOptions(step=3))


def test_the_architecture_a_model_came_with_is_kept(tmp_path: Path) -> None:
    """Of several that could hold a model, the one that its name says."""
    for name, settings in (("opt", OPT), ("mistral", LLAMA), ("gpt2", GPT), ("llama", LLAMA)):
        model = model_of(settings, name=name)
        path = converted(InMemory(model, random_weights(model)), tmp_path / name, "hf")
        assert json.loads((path / "config.json").read_text())["model_type"] == name
        assert open_source(path).model.name == name
