"""Models of ours as Hugging Face checkpoints, computed with by `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.run import check_equal
from megads.convert.source import WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Mesh
from megads.train.agreement import compare_logits
from megads.train.load import load_model
from tests.convert.hf_models import (
    InMemory,
    assert_same_bits,
    converted,
    load_quietly,
    logits_of,
    raw_tensors,
)
from tests.models.stages import local_piece, make_stage, random_weights
from tests.train.test_load import canonical, gpt2, save_sharded

GPT: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 44}
OPT = {**GPT, "activation": "relu", "name": "opt"}
NEOX: dict[str, Any] = {**GPT, "position": "rope", "activation": "gelu", "tie_embeddings": False}
BLOOM: dict[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 6,
    "position": "alibi",
    "embedding_norm": True,
}
NO_BIASES: dict[str, Any] = {"qkv_bias": False, "attn_out_bias": False, "mlp_bias": False}
LLAMA: dict[str, Any] = {
    **NO_BIASES,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 44,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "position": "rope",
    "rope_theta": 500.0,
    "tie_embeddings": False,
}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "original_max_seq_length": 16}
LINEAR = {"kind": "linear", "factor": 2.0}
RATIOS = {
    f"llama, {heads} heads on {kv}": ("Llama", {"num_attention_heads": heads, "num_kv_heads": kv})
    for heads, kv in [(4, 1), (6, 2), (6, 3), (8, 2)]
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, untied": ("GPT2", {**GPT, "tie_embeddings": False, "activation": "gelu"}),
    "gpt2, relu": ("GPT2", {**GPT, "activation": "relu", "norm_eps": 1e-3}),
    "opt": ("OPT", OPT),
    "opt, no biases": ("OPT", {**OPT, **NO_BIASES, "activation": "gelu_tanh"}),
    "bloom, untied": ("Bloom", {**BLOOM, "tie_embeddings": False}),
    "neox, sequential": ("GPTNeoX", {**NEOX, "activation": "gelu_tanh", "tie_embeddings": True}),
    "neox, part rotated": (
        "GPTNeoX",
        {**NEOX, "parallel_residual": True, "rope_fraction": 0.67, "rope_scaling": LINEAR},
    ),
    "neox, few biases": ("GPTNeoX", {**NEOX, "qkv_bias": False, "attn_out_bias": False}),
    "llama, biases": ("Llama", {**LLAMA, **dict.fromkeys(NO_BIASES, True)}),
    "llama, tied, gelu": ("Llama", {**LLAMA, "tie_embeddings": True, "activation": "geglu"}),
    "llama, linear": ("Llama", {**LLAMA, "rope_scaling": LINEAR, "head_dim": 10}),
    "llama, llama3": ("Llama", {**LLAMA, "rope_scaling": LLAMA3}),
    "mistral": ("Mistral", {**LLAMA, "attention_window": 7}),
    "mistral, odd heads": ("Mistral", {**LLAMA, "hidden_size": 25, "head_dim": 6}),
    "qwen2": ("Qwen2", {**LLAMA, "qkv_bias": True, "head_dim": 10}),
    "qwen2, window": ("Qwen2", {**LLAMA, "qkv_bias": True, "attention_window": 7}),
    "qwen3": ("Qwen3", {**LLAMA, "qk_norm": True, "qkv_bias": True, "attn_out_bias": True}),
    "qwen3, window": ("Qwen3", {**LLAMA, "qk_norm": True, "head_dim": 10, "attention_window": 5}),
    **{
        name: (kind, {**LLAMA, "hidden_size": 48, **heads})
        for name, (kind, heads) in RATIOS.items()
    },
}


def model_of(settings: dict[str, Any], **more: Any) -> ModelConfig:
    sizes = {"num_layers": 2, "vocab_size": 101, "vocab_multiple": 8, "max_seq_length": 32}
    return ModelConfig.model_validate(sizes | settings | more)


def own_logits(model: ModelConfig, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    with torch.no_grad():
        return make_stage(model, weights, Mesh.single()).logits(None, MicroBatch(ids, ids))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(tmp_path: Path, name: str) -> None:
    """With random weights everywhere; and the result, read again, is the same model."""
    kind, settings = MODELS[name]
    model = model_of(settings)
    weights = random_weights(model)
    source = InMemory(model, weights)
    path = converted(source, tmp_path / "hf", "hf")
    ids = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))
    want = own_logits(model, weights, ids)
    assert want.std() > 0.5
    assert (logits_of(load_quietly(path, kind), ids) - want).abs().max() < 1e-4
    again = open_source(path)
    again.check_complete()
    assert check_equal(source, again, WriteOptions()) == len(param_specs(model))
    free = ("name", "vocab_multiple", "init_scale_output")
    assert again.model.model_dump(exclude=set(free)) == model.model_dump(exclude=set(free))


def test_what_transformers_writes(tmp_path: Path) -> None:
    """A model of the installed version, saved in several files and types, is read to the bit."""
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    source = open_source(tmp_path / "one")
    source.check_complete()
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    got = {spec.name: source.tensor("param", spec.name) for spec in param_specs(source.model)}
    assert_same_bits(got, canonical(theirs))
    theirs.bfloat16().save_pretrained(tmp_path / "two")
    source = open_source(tmp_path / "two")
    got = {spec.name: source.tensor("param", spec.name) for spec in param_specs(source.model)}
    assert_same_bits(got, canonical(theirs))


def test_files_types_and_index(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    weights = random_weights(model)
    norms = {name: t.half() for name, t in weights.items() if "norm" in name}
    source = InMemory(model, weights | norms)
    path = converted(source, tmp_path / "mixed", "hf", WriteOptions(max_file_bytes=12_000))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    tensors = raw_tensors(path)
    assert index["weight_map"].keys() == tensors.keys()
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == size
    assert set(index["weight_map"].values()) == {p.name for p in path.glob("*.safetensors")}
    assert {t.dtype for t in tensors.values()} == {torch.float16, torch.float32}
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "float32"
    load_quietly(path)
    assert check_equal(source, open_source(path), WriteOptions()) == len(param_specs(model))

    narrow = WriteOptions(dtype=torch.bfloat16)
    path = converted(source, tmp_path / "bf16", "hf", narrow)
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    head = raw_tensors(path)["lm_head.weight"]
    assert torch.equal(head, weights["head.weight"].bfloat16())
    assert check_equal(source, open_source(path), narrow) == len(param_specs(model))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({**GPT, "embedding_norm": True}, r"gpt2: embedding_norm=True"),
        ({**LLAMA, "rope_fraction": 0.67}, r"llama: rope_fraction=0.67"),
        ({**LLAMA, "parallel_residual": True}, r"llama: parallel_residual=True"),
        ({**LLAMA, "attn_out_bias": True}, r"llama: attn_out_bias=True"),
        ({**NEOX, "num_kv_heads": 2}, r"gpt_neox: num_kv_heads=2"),
        ({**BLOOM, "ffn_hidden_size": 80}, r"bloom: ffn_hidden_size=80"),
        ({**GPT, "position": "none"}, r"gpt2: position=none"),
        ({**GPT, "head_dim": 8}, r"gpt2: head_dim=8"),
    ],
)
def test_models_nobody_else_has(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    model = model_of(settings)
    with pytest.raises(CheckpointError, match=problem):
        converted(InMemory(model, random_weights(model)), tmp_path / "hf", "hf")
    assert list(tmp_path.iterdir()) == []


def rows(**codes: tuple[int, int]) -> Tensor:
    """Part after part, `count` heads of `base + head`, in eight rows each."""
    heads = [base + head for base, count in codes.values() for head in range(count)]
    return torch.tensor(heads, dtype=torch.float32).repeat_interleave(8)


def test_rows_of_grouped_heads(tmp_path: Path) -> None:
    """q, k and v apart on one side, one below the other on ours, heads of a rank together."""
    model = model_of(LLAMA, hidden_size=32, head_dim=8)
    weights = random_weights(model)
    name = "blocks.1.attn.qkv.weight"
    weights[name] = rows(q=(100, 4), k=(200, 2), v=(300, 2))[:, None].repeat(1, 32)
    path = converted(InMemory(model, weights), tmp_path / "hf", "hf")
    tensors = raw_tensors(path)
    for part, base, count in (("q", 100, 4), ("k", 200, 2), ("v", 300, 2)):
        stored = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert torch.equal(stored[:, 5], rows(x=(base, count)))
    source = open_source(converted(path, tmp_path / "m", "megads"))
    fused = source.tensor("param", name)
    assert torch.equal(fused, weights[name])
    spec = {spec.name: spec for spec in param_specs(model)}[name]
    heads = [local_piece(spec, fused, 2, rank)[::8, 0].tolist() for rank in range(2)]
    assert heads == [[100, 101, 200, 300], [102, 103, 201, 301]]


def test_rows_and_biases_of_fused_heads(tmp_path: Path) -> None:
    """Row 100 * part + 10 * head + dim: GPT-2 has them by part, BLOOM by head, biases too."""
    part, head, dim = torch.meshgrid(*(torch.arange(n) for n in (3, 4, 6)), indexing="ij")
    codes = (100 * part + 10 * head + dim).float()
    model = model_of(GPT)
    weights = random_weights(model)
    for kind in ("weight", "bias"):
        name = f"blocks.0.attn.qkv.{kind}"
        shape = weights[name].shape
        weights[name] = codes.flatten().view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
    tensors = raw_tensors(converted(InMemory(model, weights), tmp_path / "gpt2", "hf"))
    assert torch.equal(tensors["transformer.h.0.attn.c_attn.weight"][9], codes.flatten())
    assert torch.equal(tensors["transformer.h.0.attn.c_attn.bias"], codes.flatten())

    sizes = {"hidden_size": 24, "num_attention_heads": 4}
    model = model_of(BLOOM, **sizes)
    own = {key: weights[key] for key in weights if "attn.qkv" in key}
    path = converted(InMemory(model, random_weights(model) | own), tmp_path / "bloom", "hf")
    tensors = raw_tensors(path)
    by_head = codes.transpose(0, 1).flatten()
    stored = "transformer.h.0.self_attention.query_key_value"
    assert torch.equal(tensors[f"{stored}.weight"][:, 9], by_head)
    assert torch.equal(tensors[f"{stored}.bias"], by_head)


def test_halves_of_a_gated_layer(tmp_path: Path) -> None:
    """Gate rows 1000.., up rows 2000.., biases too, on any number of ranks."""
    model = model_of(LLAMA, mlp_bias=True, ffn_hidden_size=48)
    weights = random_weights(model)
    codes = torch.cat([torch.arange(1000.0, 1048.0), torch.arange(2000.0, 2048.0)])
    weights["blocks.0.mlp.up.weight"] = codes[:, None].repeat(1, 24)
    weights["blocks.0.mlp.up.bias"] = codes
    path = converted(InMemory(model, weights), tmp_path / "hf", "hf")
    tensors = raw_tensors(path)
    for part, base in (("gate", 1000), ("up", 2000)):
        want = torch.arange(float(base), base + 48.0)
        stored = f"model.layers.0.mlp.{part}_proj"
        assert torch.equal(tensors[f"{stored}.weight"][:, 3], want)
        assert torch.equal(tensors[f"{stored}.bias"], want)
    source = open_source(path)
    for spec in param_specs(model):
        if spec.name.startswith("blocks.0.mlp.up"):
            local = local_piece(spec, source.tensor("param", spec.name), 2, 1).view(48, -1)[:, 0]
            assert local.tolist() == [*range(1024, 1048), *range(2024, 2048)]


def test_vocabulary_padding_stays_inside(tmp_path: Path) -> None:
    """Four ranks pad 101 words to 128; the file has 101, and no other is ever the likeliest."""
    theirs = gpt2()
    save_sharded(tmp_path / "run", canonical(theirs), 4, 1)
    path = converted(tmp_path / "run", tmp_path / "hf", "hf")
    words = raw_tensors(path)["transformer.wte.weight"]
    assert torch.equal(words, theirs.transformer.wte.weight)
    model = ModelConfig.model_validate(open_source(path).model.model_dump() | {"vocab_multiple": 8})
    weights = {k: v.detach().clone() for k, v in canonical(theirs).items()}
    weights["embedding.word.weight"].fill_(-1.0)
    weights["final_norm.weight"].fill_(0.0)
    weights["final_norm.bias"].fill_(5.0)
    again = converted(InMemory(model, weights), tmp_path / "negative", "megads")
    logits = logits_of(load_model(again), torch.randint(0, 101, (2, 16)))
    assert logits.shape[-1] == 101 and (logits < -100).all()


def test_check_compares_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source that is ours or not, rounded or not; a model that says something else is seen."""
    model = model_of(LLAMA)
    source = InMemory(model, random_weights(model))
    ours = open_source(converted(source, tmp_path / "m", "megads"))
    hf = open_source(converted(ours, tmp_path / "hf", "hf"))
    narrow = open_source(converted(ours, tmp_path / "bf16", "hf", WriteOptions(torch.bfloat16)))
    for pair in ((ours, hf), (hf, ours), (source, hf), (ours, narrow)):
        assert "logits of 64 random ids equal those of transformers" in compare_logits(*pair)
    assert compare_logits(ours, ours) == ""
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings | {"rope_theta": 100.0}))
    with pytest.raises(CheckpointError, match=r"logits differ by .* megads and transformers"):
        compare_logits(ours, hf)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "transformers is not installed" in compare_logits(ours, hf)
