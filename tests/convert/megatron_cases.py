"""What the tests of Megatron-LM's formats share: its files read and cut by rules spelt out here.

Nothing of the converter is used but the restricted unpickler, and `open_source` to be tested.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.pickles import load_pickle
from megads.convert.source import Kind, Source
from megads.models.families import param_specs

FILE = "model_optim_rng.pt"
GPT = ("gpt_tp1pp1", "gpt_tp2pp1", "gpt_tp2pp2")
LLAMA = ("llama_tp1pp1", "llama_tp2pp2", "llama_dist_tp2pp1")


def canonical(source: Source, kind: Kind = "param") -> dict[str, Tensor]:
    return {spec.name: source.tensor(kind, spec.name) for spec in param_specs(source.model)}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Equal to the bit, and in type."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def random_tensors(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator) for s in param_specs(model)}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:20]


def hashes(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = json.loads((folder / "expected_hf_tensors.json").read_text())[
        "tensors"
    ]
    return tensors


def hf_tensors(model: ModelConfig, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and shapes as transformers has them: GPT-2 if positions are learned, else LLaMA."""
    gpt = model.position == "learned"
    blocks = "transformer.h" if gpt else "model.layers"
    gpt_names = {
        "attn_norm": "ln_1",
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    llama_names = {
        "attn_norm": "input_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "attn.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
    }
    ends = {
        "embedding.word": "transformer.wte" if gpt else "model.embed_tokens",
        "embedding.position": "transformer.wpe",
        "final_norm": "transformer.ln_f" if gpt else "model.norm",
        "head": "lm_head",
    }
    q = model.num_attention_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    for name, tensor in ours.items():
        module, _, kind = name.rpartition(".")
        if module in ends:
            yield f"{ends[module]}.{kind}", tensor
            continue
        _, layer, part = module.split(".", 2)
        prefix = f"{blocks}.{layer}"
        if gpt:
            matrix = tensor.ndim == 2
            yield f"{prefix}.{gpt_names[part]}.{kind}", tensor.t() if matrix else tensor
        elif part == "attn.qkv":
            for which, piece in zip("qkv", tensor.split([q, kv, kv]), strict=True):
                yield f"{prefix}.self_attn.{which}_proj.{kind}", piece
        elif part == "mlp.up":
            for which, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{prefix}.mlp.{which}_proj.{kind}", piece
        else:
            yield f"{prefix}.{llama_names[part]}.{kind}", tensor


def differing(model: ModelConfig, ours: Mapping[str, Tensor], want: Mapping[str, Any]) -> set[str]:
    """Names of tensors whose hash is not the stored one, or that are on one side only.

    The stored hashes lack GPT-2's `c_attn.bias`; logits have to tell of it.
    """
    have = {name: [list(t.shape), digest(t)] for name, t in hf_tensors(model, ours)}
    names = {name for name in have.keys() | want.keys() if not name.endswith("c_attn.bias")}
    return {name for name in names if have.get(name) != want.get(name)}


def read_ranks(folder: Path) -> list[list[dict[str, Any]]]:
    """The content of all files, `[stage][tensor rank]`."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        numbers = [int(n) for n in path.parent.name.removeprefix("mp_rank_").split("_")]
        found[numbers[1] if numbers[1:] else 0, numbers[0]] = load_pickle(path)
    stages = max(stage for stage, _ in found) + 1
    ranks = max(rank for _, rank in found) + 1
    return [[found[stage, rank] for rank in range(ranks)] for stage in range(stages)]


def only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def joined(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Core's files put together with loops over rows: global Megatron names, canonical rows."""
    whole: dict[str, Tensor] = {}
    before = 0
    for stage in read_ranks(folder):
        states = [only_tensors(rank["model"]) for rank in stage]
        layers = set()
        for name in states[0]:
            parts = [state[name] for state in states]
            if name.startswith("decoder.layers."):
                layers.add(int(name.split(".")[2]))
                number = str(before + int(name.split(".")[2]))
                name = ".".join(["decoder.layers", number, *name.split(".")[3:]])
            whole[name] = _joined(name, parts, model)
        before += len(layers)
    return whole


def _joined(name: str, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    if "linear_qkv." in name:
        rows = [row for part in parts for row in part]
        queries = model.num_attention_heads // model.num_kv_heads
        q, k, v = [], [], []
        for number, row in enumerate(rows):
            head = number // model.head_dim % (queries + 2)
            (q if head < queries else k if head == queries else v).append(row)
        return torch.stack(q + k + v)
    if "linear_fc1." in name and model.gated:
        gates = [row for part in parts for row in part[: len(part) // 2]]
        ups = [row for part in parts for row in part[len(part) // 2 :]]
        return torch.stack(gates + ups)
    if "linear_fc1." in name or "word_embeddings" in name or "output_layer" in name:
        return torch.stack([row for part in parts for row in part])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.stack([column for part in parts for column in part.t()]).t()
    for part in parts:
        assert torch.equal(part, parts[0])
    return parts[0]


CORE = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "head": "output_layer",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attention.linear_qkv",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.k_norm": "self_attention.k_layernorm",
    "attn.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}


def core_name(name: str) -> str:
    """Megatron core's name, with the layer's number in the whole model."""
    module, _, kind = name.rpartition(".")
    if module in CORE:
        return f"{CORE[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"decoder.layers.{layer}.{CORE[part]}.{kind}"


def training_samples(cases: Path) -> Tensor:
    """The 32 samples that the runs were trained on, `[32, 49]`, from the files by their indices."""
    indices = cases / "data" / "expected_train_run"
    documents, samples, shuffle = (
        np.load(indices / f"train.0.{name}_index.npy") for name in ("document", "sample", "shuffle")
    )
    header = (cases / "data" / "topics_a_text_document.idx").read_bytes()
    count = int.from_bytes(header[18:26], "little")
    sizes = np.frombuffer(header, np.int32, count, 34)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    dtype = {8: np.uint16, 4: np.int32}[header[17]]
    tokens = np.fromfile(cases / "data" / "topics_a_text_document.bin", dtype)
    found = []
    for number in shuffle[:32]:
        (first, start), (last, stop) = samples[number], samples[number + 1]
        pieces = []
        for place in range(first, last + 1):
            document = documents[place]
            low = start if place == first else 0
            high = stop + 1 if place == last else sizes[document]
            pieces.append(tokens[starts[document] + low : starts[document] + high])
        found.append(np.concatenate(pieces).astype(np.int64))
    return torch.from_numpy(np.stack(found))
