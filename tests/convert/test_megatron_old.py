"""Files from before Megatron core, in every order of query, key and value they came in."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.convert.megatron.args import Setting, read_model
from megads.convert.run import open_checked
from megads.convert.source import ReadOptions, Source
from megads.errors import CheckpointError
from tests.convert.megatron_cases import FILE, assert_same, canonical, random_tensors

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    vocab_size=20,
    vocab_multiple=4,
    max_seq_length=8,
)
HEADS, WIDTH = 2, 6
ARGS = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "make_vocab_size_divisible_by": 4,
    "layernorm_epsilon": 1e-5,
    "bias_gelu_fusion": True,
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn.qkv": "{attention}.query_key_value",
    "attn.out": "{attention}.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def stamped() -> dict[str, Tensor]:
    """Rows of qkv say which they are: 100 x part + 10 x head + dim."""
    tensors = random_tensors(MODEL)
    rows = [100 * p + 10 * h + d for p in range(3) for h in range(HEADS) for d in range(WIDTH)]
    stamps = torch.tensor(rows, dtype=torch.float32)
    for layer in range(2):
        tensors[f"blocks.{layer}.attn.qkv.bias"] = stamps + 1000 * layer
        tensors[f"blocks.{layer}.attn.qkv.weight"] = stamps[:, None].expand(36, 12) + 1000 * layer
    return tensors


def ordered(version: float | None, tensor: Tensor, heads: list[int]) -> Tensor:
    """A rank's rows of qkv, one at a time: outermost first as the version has them."""
    found = []
    if version in (None, 0):
        order = [(p, h, d) for p in range(3) for h in heads for d in range(WIDTH)]
    elif version == 1.0:
        order = [(p, h, d) for h in heads for d in range(WIDTH) for p in range(3)]
    else:
        order = [(p, h, d) for h in heads for p in range(3) for d in range(WIDTH)]
    for part, head, dim in order:
        found.append(tensor[part * HEADS * WIDTH + head * WIDTH + dim])
    return torch.stack(found)


def rank_state(version: float | None, tp: int, rank: int, *, spelling: tuple[str, str]) -> Any:
    """Nested dictionaries of one rank; `spelling` of the blocks' container and of attention."""
    container, attention = spelling
    blocks: OrderedDict[str, Tensor] = OrderedDict()
    embedding: dict[str, OrderedDict[str, Tensor]] = {}
    for name, tensor in stamped().items():
        module, _, kind = name.rpartition(".")
        if module.startswith("embedding."):
            key = module.split(".")[1] + "_embeddings"
            part = tensor.chunk(tp)[rank].clone() if key == "word_embeddings" else tensor
            embedding[key] = OrderedDict(weight=part)
        elif module == "final_norm":
            blocks[f"final_layernorm.{kind}"] = tensor
        else:
            _, layer, part_name = module.split(".", 2)
            if part_name == "attn.qkv":
                heads = list(range(rank * HEADS // tp, (rank + 1) * HEADS // tp))
                tensor = ordered(version, tensor, heads)
            elif part_name == "mlp.up":
                tensor = tensor.chunk(tp)[rank].clone()
            elif part_name in ("attn.out", "mlp.down") and kind == "weight":
                tensor = tensor.chunk(tp, dim=1)[rank].clone()
            old = NAMES[part_name].format(attention=attention)
            blocks[f"layers.{layer}.{old}.{kind}"] = tensor
    return {"language_model": {"embedding": embedding, container: blocks}}


def write(folder: Path, version: float | None, tp: int, **changes: Any) -> Path:
    spelling = changes.pop("spelling", ("encoder", "self_attention"))
    for rank in range(tp):
        path = folder / "iter_0000003" / f"mp_rank_{rank:02d}" / FILE
        path.parent.mkdir(parents=True)
        content = {
            "iteration": 3,
            "args": argparse.Namespace(**(ARGS | changes)),
            "model": rank_state(version, tp, rank, spelling=spelling),
        }
        if version is not None:
            content["checkpoint_version"] = version
        torch.save(content, path, _use_new_zipfile_serialization=spelling[0] == "encoder")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def opened(folder: Path) -> Source:
    return open_checked(folder, "auto", ReadOptions(vocab_size=20))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
def test_every_order_of_qkv(version: float | None, tp: int, tmp_path: Path) -> None:
    """A file without a version is of version 0, as Megatron-LM has it."""
    source = opened(write(tmp_path / "old", version, tp))
    assert source.model == MODEL and source.trained.step == 3
    assert_same(canonical(source), {n: t.contiguous() for n, t in stamped().items()})


@pytest.mark.parametrize("version", [0, 1.0])
def test_a_wrong_version_is_seen(version: float, tmp_path: Path) -> None:
    folder = write(tmp_path / "old", version, 1)
    path = folder / "iter_0000003" / "mp_rank_00" / FILE
    state = rank_state(version, 1, 0, spelling=("encoder", "self_attention"))
    content = {"iteration": 3, "args": argparse.Namespace(**ARGS), "model": state}
    torch.save(content | {"checkpoint_version": 2.0}, path)
    wrong, right = canonical(opened(folder)), stamped()
    differing = {name for name, tensor in right.items() if not torch.equal(wrong[name], tensor)}
    assert differing == {
        f"blocks.{i}.attn.qkv.{kind}" for i in range(2) for kind in ("weight", "bias")
    }


def test_the_oldest_spelling_and_file_format(tmp_path: Path) -> None:
    folder = write(tmp_path / "old", 0, 2, spelling=("transformer", "attention"))
    assert_same(canonical(opened(folder)), {n: t.contiguous() for n, t in stamped().items()})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_layers": 3}, "num_layers=3, and the files hold 2 layers"),
        ({"num_layers": 10**9}, "num_layers=1000000000, and the files hold 2 layers"),
        ({"hidden_size": 24}, r"embedding.word.weight should have shape \(20, 24\)"),
        ({"hidden_size": None}, "describe no model"),
        ({"num_experts": 4}, "not supported: Megatron-LM's num_experts=4"),
        ({"normalization": "Other"}, "normalization='Other'"),
        ({"softmax_type": "learnable"}, "not supported: Megatron-LM's softmax_type='learnable'"),
        ({"softmax_scale": 0.5}, "not supported: Megatron-LM's softmax_scale=0.5"),
        ({"glu_linear_offset": 1.0}, "not supported: Megatron-LM's glu_linear_offset=1.0"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value=7.0"),
        (
            {"tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4, and there are files for 1",
        ),
        ({"embed_layernorm": True}, "lacks param of embedding.word_embeddings.norm.weight"),
        ({"untie_embeddings_and_output_weights": True}, r"lacks param of output_layer.weight"),
    ],
)
def test_lies_are_named(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "old", 3.0, 1, **change)
    with pytest.raises(CheckpointError, match=match) as error:
        canonical(opened(folder))
    assert "iter_0000003" in str(error.value)


def test_defaults_are_not_refused(tmp_path: Path) -> None:
    defaults = {
        "softmax_type": "vanilla",
        "softmax_scale": None,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
    }
    assert opened(write(tmp_path / "old", 3.0, 1, **defaults)).model == MODEL


@pytest.mark.parametrize("before_core", [False, True])
@pytest.mark.parametrize(
    ("args", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"bias_gelu_fusion": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"add_bias_linear": False}, "gelu"),
        ({"swiglu": True}, "swiglu"),
    ],
)
def test_gelu_is_fused_unless_something_says_otherwise(
    args: dict[str, Any], activation: str, before_core: object
) -> None:
    known = {key: value for key, value in ARGS.items() if key != "bias_gelu_fusion"}
    setting = Setting(20, before_core=bool(before_core))
    assert read_model(known | args, setting).activation == activation


def test_dictionaries_without_end_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "old", 3.0, 1)
    path = folder / "iter_0000003" / "mp_rank_00" / FILE
    model = rank_state(3.0, 1, 0, spelling=("encoder", "self_attention"))
    model["language_model"]["encoder"]["again"] = model["language_model"]
    content = {"iteration": 3, "args": argparse.Namespace(**ARGS), "checkpoint_version": 3.0}
    torch.save(content | {"model": model}, path)
    with pytest.raises(CheckpointError, match="too many dictionaries"):
        open_source(folder)


def test_left_over_tensors_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "old", 3.0, 1)
    path = folder / "iter_0000003" / "mp_rank_00" / FILE
    model = rank_state(3.0, 1, 0, spelling=("encoder", "self_attention"))
    model["language_model"]["pooler"] = OrderedDict(weight=torch.zeros(2))
    content = {"iteration": 3, "args": argparse.Namespace(**ARGS), "checkpoint_version": 3.0}
    torch.save(content | {"model": model}, path)
    open_source(folder)
    with pytest.raises(CheckpointError, match=re.escape("language_model.pooler.weight")):
        opened(folder)
