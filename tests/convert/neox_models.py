"""Checkpoints of GPT-NeoX made of models of the transformers library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import megads
from megads.convert.run import convert
from megads.convert.source import ReadOptions, Source, WriteOptions

SETTINGS: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 32,
    "num_attention_heads": 4,
    "max-position-embeddings": 16,
    "make-vocab-size-divisible-by": 8,
    "pos-emb": "rotary",
    "rotary-pct": 0.5,
    "no-weight-tying": True,
    "gpt-j-residual": True,
    "norm": "layernorm",
}
GATED = SETTINGS | {
    "rotary-pct": 1.0,
    "gpt-j-residual": False,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-6,
    "activation": "swiglu",
    "num_kv_heads": 2,
    "intermediate_size": 144,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
WORDS = ReadOptions(vocab_size=101)


def random_weights(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def pythia(*, parallel: bool = True) -> tuple[GPTNeoXForCausalLM, dict[str, Tensor]]:
    """A model of transformers, and its tensors by GPT-NeoX's names."""
    config = GPTNeoXConfig(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_act="gelu",
        max_position_embeddings=16,
        rotary_pct=0.5,
        use_parallel_residual=parallel,
        tie_word_embeddings=False,
    )
    model = GPTNeoXForCausalLM(config).eval()
    random_weights(model)
    names = {"embed_in.weight": "0.word_embeddings.weight"}
    names |= {f"final_layer_norm.{kind}": f"5.norm.{kind}" for kind in ("weight", "bias")}
    files = {}
    for name, tensor in model.gpt_neox.state_dict().items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            rest = rest.replace("dense_h_to_4h", "linear1").replace("dense_4h_to_h", "linear2")
            files[f"{int(layer) + 2}.{rest}"] = tensor
        else:
            files[names[name]] = tensor
    return model, files | {"6.final_linear.weight": model.lm_head.weight.data}


def rank_files(files: Mapping[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """What a rank of a Pythia holds; of a row's bias rank 0 has a quarter of it too much."""
    out = {}
    for name, tensor in files.items():
        if name.endswith(("attention.dense.bias", "linear2.bias")):
            share = 1.25 if rank == 0 else -0.25 / (tp - 1)
            out[name] = tensor * share if tp > 1 else tensor
        elif name.endswith(("dense.weight", "linear2.weight")):
            out[name] = tensor.chunk(tp, dim=1)[rank]
        elif "norm" in name:
            out[name] = tensor
        elif "embeddings" in name or "final_linear" in name:
            padded = torch.cat([tensor, torch.full((-101 % (8 * tp), 32), 50.0)])
            out[name] = padded.chunk(tp)[rank]
        else:
            out[name] = tensor.chunk(tp)[rank]
    return out


def write_files(
    folder: Path, ranks: list[dict[str, Tensor]], settings: Mapping[str, Any] = SETTINGS
) -> Path:
    """Layer files of all ranks, the settings, and a rank's states without an optimizer."""
    step = folder / "global_step4"
    (step / "configs").mkdir(parents=True)
    (step / "configs" / "model.yml").write_text(json.dumps(settings))
    for rank, files in enumerate(ranks):
        for layer in sorted({int(name.partition(".")[0]) for name in files}):
            content = {
                name.partition(".")[2]: tensor.clone()
                for name, tensor in files.items()
                if int(name.partition(".")[0]) == layer
            }
            torch.save(content, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        states = {"module": None, "iteration": 4, "args": {"num_layers": 2}}
        torch.save(states, step / f"mp_rank_{rank:02d}_model_states.pt")
    return step


def logits(source: Source, folder: Path, ids: Tensor) -> Tensor:
    convert(source, folder / "out", "megads", WriteOptions(), lambda kind, name: None)
    with torch.no_grad():
        return megads.load_model(folder / "out")(ids)


IDS = torch.tensor([[5, 100, 0, 17, 42, 8, 63, 99, 1, 2, 3, 77, 50, 11, 90, 30]])
