"""Checkpoints that `transformers` wrote: read, computed with in any layout, and written again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megads
from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.hf import layout as hf_layout
from megads.convert.hf.architectures import ARCHITECTURES
from megads.convert.source import WriteOptions
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Mesh
from tests.cases import case
from tests.convert.hf_models import (
    assert_same_bits,
    converted,
    load_quietly,
    logits_of,
    raw_tensors,
)
from tests.distributed import Workers
from tests.models.huggingface import FAMILIES
from tests.models.stages import Chunk, make_stage, run_rank
from tests.training import read_checkpoint

CASES = {
    "bloom": "Bloom",
    "gpt2": "GPT2",
    "gpt2_hub_style": "GPT2",
    "llama31_tied": "Llama",
    "llama_gqa_sharded": "Llama",
    "llama_mha_v4": "Llama",
    "mistral": "Mistral",
    "opt": "OPT",
    "pythia": "GPTNeoX",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A model that was written elsewhere, its tensors as stored, and what it computed there."""

    path: Path
    ids: Tensor
    logits: Tensor
    facts: dict[str, Any]
    stored: dict[str, Tensor]


@functools.cache
def recorded(name: str) -> Recorded:
    path = case(f"hf/{name}")
    return Recorded(
        path,
        torch.from_numpy(np.load(path / "expected_input_ids.npy")),
        torch.from_numpy(np.load(path / "expected_logits.npy")),
        json.loads((path / "expected.json").read_text()),
        raw_tensors(path),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of ours that a recorded model becomes."""
    folder = tmp_path_factory.mktemp("ours")

    @functools.cache
    def make(name: str) -> Path:
        return converted(recorded(name).path, folder / name, "megads")

    return make


def opt_canonical(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """OPT's tensors under our names; its positions begin at the third row."""
    top = "model.decoder"
    out = {
        "embedding.word.weight": raw[f"{top}.embed_tokens.weight"],
        "embedding.position.weight": raw[f"{top}.embed_positions.weight"][2:],
    }
    places = {
        "attn_norm": ["self_attn_layer_norm"],
        "attn.qkv": [f"self_attn.{x}_proj" for x in "qkv"],
        "attn.out": ["self_attn.out_proj"],
        "mlp_norm": ["final_layer_norm"],
        "mlp.up": ["fc1"],
        "mlp.down": ["fc2"],
    }
    for kind in ("weight", "bias"):
        out[f"final_norm.{kind}"] = raw[f"{top}.final_layer_norm.{kind}"]
        for i in range(config.num_layers):
            for mine, theirs in places.items():
                parts = [raw[f"{top}.layers.{i}.{name}.{kind}"] for name in theirs]
                out[f"blocks.{i}.{mine}.{kind}"] = torch.cat(parts)
    return out


def expected_tensors(name: str, config: ModelConfig) -> dict[str, Tensor]:
    """A recorded model's tensors under our names, by a table that is not the converter's."""
    raw = recorded(name).stored
    if name == "opt":
        return opt_canonical(raw, config)
    if name == "gpt2_hub_style":
        raw = {f"transformer.{key}": t for key, t in raw.items()}
    kind = CASES[name]
    family = {"GPTNeoX": "neox"}.get(kind, kind.lower())
    return FAMILIES[family].canonical(raw, config)


def weights_of(path: Path) -> dict[str, Tensor]:
    """What a checkpoint of ours holds, in the types it says."""
    step = next(path.glob("step-*"))
    types = json.loads((step / "manifest.json").read_text())["tensors"]
    return {
        key.removeprefix("param/"): tensor.to(getattr(torch, types[key]["dtype"]))
        for key, tensor in read_checkpoint(step).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_every_bit_and_every_logit(ours: Callable[[str], Path], name: str) -> None:
    want, path = recorded(name), ours(name)
    config = open_source(path).model
    assert_same_bits(weights_of(path), expected_tensors(name, config))
    model = megads.load_model(path, dtype=torch.float32)
    logits = logits_of(model, want.ids)
    assert (logits - want.logits).abs().max() < TOLERANCE
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), want.ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(want.facts["mean_next_token_loss"], abs=1e-5)
    said = list(want.facts["greedy"]["prompt"])
    for token in want.facts["greedy"]["next"]:
        assert int(logits_of(model, torch.tensor([said]))[0, -1].argmax()) == token
        said.append(token)


@pytest.mark.parametrize("name", CASES)
def test_back_again(ours: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Every tensor as it was stored, and `transformers` computes what it did."""
    want = recorded(name)
    options = WriteOptions(max_file_bytes=100_000) if "sharded" in name else None
    back = converted(ours(name), tmp_path / "back", "hf", options)
    assert (back / "model.safetensors.index.json").exists() == ("sharded" in name)
    stored = dict(want.stored)
    got = raw_tensors(back)
    if name == "gpt2_hub_style":
        stored = {f"transformer.{k}": t for k, t in stored.items() if not k.endswith(".attn.bias")}
    if name == "opt":  # the rows no token is at come back empty
        positions = "model.decoder.embed_positions.weight"
        assert not got[positions][:2].any()
        got[positions][:2] = stored[positions][:2]
    assert_same_bits(got, stored)
    model = load_quietly(back, CASES[name])
    assert (logits_of(model, want.ids) - want.logits).abs().max() < TOLERANCE


def test_what_is_not_a_weight_comes_along(tmp_path: Path) -> None:
    """Tokenizer files to the letter, token ids of config.json; not ids that cannot be."""
    source = tmp_path / "source"
    source.mkdir()
    for file in recorded("opt").path.glob("*"):
        (source / file.name).write_bytes(file.read_bytes())
    (source / "tokenizer.json").write_text("{ }")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    back = converted(converted(source, tmp_path / "m", "megads"), tmp_path / "back", "hf")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (back / name).read_text() == (source / name).read_text()
    said = json.loads((back / "config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"], said["pad_token_id"]) == (2, 2, 1)
    assert sorted(path.name for path in back.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    gpt2 = converted(recorded("gpt2").path, tmp_path / "gpt2", "hf")
    assert json.loads((gpt2 / "config.json").read_text())["eos_token_id"] is None


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa_sharded", "pythia", "bloom"])
def test_two_tensor_parallel_ranks(
    ours: Callable[[str], Path], workers: Workers, name: str
) -> None:
    want, config = recorded(name), open_source(ours(name)).model
    batch = MicroBatch(want.ids, want.ids)
    weights = {key: tensor.float() for key, tensor in weights_of(ours(name)).items()}
    for outcome in workers(2).run(run_rank, config, weights, batch, {}):
        assert (outcome.logits - want.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama31_tied", "opt", "qwen3"])
def test_two_pipeline_stages(ours: Callable[[str], Path], name: str) -> None:
    want, config = recorded(name), open_source(ours(name)).model
    weights, batch = weights_of(ours(name)), MicroBatch(want.ids, want.ids)
    first = make_stage(config, weights, Mesh.single(), chunk=Chunk(range(1), has_head=False))
    rest = Chunk(range(1, config.num_layers), has_embedding=False)
    second = make_stage(config, weights, Mesh.single(), chunk=rest)
    with torch.no_grad():
        logits = second.logits(first(None, batch), batch)
    assert (logits - want.logits).abs().max() < TOLERANCE


def test_a_wrong_order_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: each mistake fits all shapes and moves the logits."""

    def error(name: str) -> float:
        target = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        path = converted(recorded(name).path, target, "megads")
        logits = logits_of(megads.load_model(path, dtype=torch.float32), recorded(name).ids)
        return float((logits - recorded(name).logits).abs().max())

    assert error("bloom") < TOLERANCE
    monkeypatch.setattr(hf_layout, "from_grouped", lambda tensor, model: tensor)
    assert error("bloom") > 100 * TOLERANCE
    assert error("pythia") > 100 * TOLERANCE
    orders = {known.model_type: known.names.orders for known in ARCHITECTURES}
    monkeypatch.setitem(orders["gpt2"], "attn.out", "plain")  # a square matrix
    assert error("gpt2") > 100 * TOLERANCE
    (llama,) = (known.names for known in ARCHITECTURES if known.model_type == "llama")
    monkeypatch.setitem(llama.block, "mlp.up", ("mlp.up_proj", "mlp.gate_proj"))
    assert error("llama_gqa_sharded") > 100 * TOLERANCE


def test_what_we_lack_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"MixtralForCausalLM.*mixtral.*known: gpt2, opt"):
        converted(case("hf/unsupported_mixtral"), tmp_path / "m", "megads")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama_mha_v4"])
def test_pickled_weights(
    ours: Callable[[str], Path], tmp_path: Path, name: str, *, sharded: bool
) -> None:
    """`pytorch_model.bin` as `torch.save` writes it, a tied head included."""
    path = tmp_path / "bin"
    path.mkdir()
    stored = dict(recorded(name).stored)
    if name == "gpt2":
        stored["lm_head.weight"] = stored["transformer.wte.weight"]
    (path / "config.json").write_bytes((recorded(name).path / "config.json").read_bytes())
    if sharded:
        names = sorted(stored)
        files = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        for file, inside in files.items():
            torch.save({key: stored[key] for key in inside}, path / file)
        index = {"weight_map": {key: file for file, inside in files.items() for key in inside}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(stored, path / "pytorch_model.bin")
    source = open_source(path)
    source.check_complete()
    config = source.model
    got = {spec.name: source.tensor("param", spec.name) for spec in param_specs(config)}
    assert_same_bits(got, expected_tensors(name, config))
