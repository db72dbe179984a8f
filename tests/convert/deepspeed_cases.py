"""What the tests of DeepSpeed's formats share: how their ranks cut a model, spelt out by loops.

Everything here goes from canonical tensors to files, the other way than the converter, and knows
nothing of it. The files of other software in the cases say whether it is right.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.convert.source import Kind, Source
from megads.models.families import param_specs

KINDS: tuple[Kind, ...] = ("param", "exp_avg", "exp_avg_sq")
MEGATRON = {
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attention.query_key_value",
    "attn.out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
NEOX = {
    **MEGATRON,
    "attn.qkv": "attention.query_key_value",
    "attn.out": "attention.dense",
    "mlp.up": "mlp.linear1",
    "mlp.down": "mlp.linear2",
}


@dataclass(frozen=True)
class Dialect:
    """How software numbers, names and orders; `norm` and `head` count from the blocks' end."""

    embedding: int = 1
    first_block: int = 3
    norm: int = 1
    head: int = 2
    names: Mapping[str, str] = field(default_factory=lambda: MEGATRON)
    qkv: str = "grouped"
    gate_first: bool = True
    final: str = ""
    head_name: str = "lm_head.weight"
    scale: str = "weight"


BIGSCIENCE = Dialect()
DEEPSPEEDAI = Dialect(first_block=2, norm=0, head=1)
PYTHIA = Dialect(
    0, 2, 1, 2, names=NEOX, gate_first=False, final="norm.", head_name="final_linear.weight"
)


def place(dialect: Dialect, model: ModelConfig, name: str) -> tuple[int, str]:
    """Layer and name in it of a canonical tensor."""
    end = dialect.first_block + model.num_layers
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        kind = dialect.scale if part.endswith("_norm") and kind == "weight" else kind
        return dialect.first_block + int(layer), f"{dialect.names[part]}.{kind}"
    if name.startswith("embedding."):
        inner = name.removeprefix("embedding.")
        for ours, theirs in (("word.", ""), ("norm.", "norm."), ("position.", "")):
            if inner.startswith(ours):
                table = "position" if ours == "position." else "word"
                return dialect.embedding, f"{table}_embeddings.{theirs}{inner.split('.')[1]}"
    if name == "head.weight":
        return end + dialect.head, dialect.head_name
    kind = dialect.scale if name == "final_norm.weight" else name.rpartition(".")[2]
    return end + dialect.norm, f"{dialect.final}{kind}"


def part_of(
    dialect: Dialect, model: ModelConfig, name: str, tensor: Tensor, tp: int, rank: int
) -> Tensor:
    """What a tensor-parallel rank holds of a canonical tensor, in the order it keeps it."""
    rest = name.split(".", 2)[2] if name.startswith("blocks.") else name
    if rest in ("embedding.word.weight", "head.weight"):
        return tensor.chunk(tp)[rank]
    if rest.startswith("attn.qkv"):
        heads, groups, width = model.num_attention_heads, model.num_kv_heads, model.head_dim
        rows = [tensor[i * width : (i + 1) * width] for i in range(heads + 2 * groups)]
        q, k, v = rows[:heads], rows[heads : heads + groups], rows[heads + groups :]
        if dialect.qkv == "thirds":
            mine = [p[rank * len(p) // tp : (rank + 1) * len(p) // tp] for p in (q, k, v)]
            return torch.cat([row for part in mine for row in part])
        order = []
        for group in range(groups):
            each = heads // groups
            order += [*q[group * each : (group + 1) * each], k[group], v[group]]
        return torch.cat(order).chunk(tp)[rank]
    if rest.startswith("mlp.up") and model.gated:
        gate, up = (half.chunk(tp)[rank] for half in tensor.chunk(2))
        return torch.cat([gate, up] if dialect.gate_first else [up, gate])
    if rest.startswith("mlp.up"):
        return tensor.chunk(tp)[rank]
    if rest in ("attn.out.weight", "mlp.down.weight"):
        return tensor.chunk(tp, dim=1)[rank]
    return tensor


def stamped(model: ModelConfig, kind: Kind = "param") -> dict[str, Tensor]:
    """Element j of parameter p is p + j / 1000, and another for each kind: no two are the same."""
    shift = 1000.0 * KINDS.index(kind)
    return {
        spec.name: (shift + p + torch.arange(spec.numel) / 1000).view(spec.shape)
        for p, spec in enumerate(param_specs(model))
    }


@dataclass
class Layout:
    """How the files are cut. `padding` fills the vocabulary's and the partitions'."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    padding: float = -777.0
    vocab_multiple: int = 1
    optimizer: bool = True
    slices: bool = True
    tied_on_last: bool = False


def write_checkpoint(
    folder: Path,
    dialect: Dialect,
    model: ModelConfig,
    layout: Layout,
    states: Mapping[str, Any],
    tensors: Mapping[Kind, Mapping[str, Tensor]] | None = None,
) -> Path:
    """A checkpoint of DeepSpeed's pipeline engine in `folder`/global_step4, and a `latest`."""
    tensors = tensors or {kind: stamped(model, kind) for kind in KINDS}
    step = folder / "global_step4"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    for rank in range(layout.tp):
        layers = {kind: _rank_layers(dialect, model, layout, tensors[kind], rank) for kind in KINDS}
        for layer, content in layers["param"].items():
            torch.save(content, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        numbers = sorted(layers["param"])
        cut = [numbers[i * len(numbers) // layout.pp :] for i in range(layout.pp)] + [[]]
        for stage in range(layout.pp):
            mine = [n for n in cut[stage] if n not in cut[stage + 1]]
            if layout.tied_on_last and stage == layout.pp - 1 and dialect.embedding not in mine:
                mine.append(dialect.embedding)
            _write_rank(
                step, layers, mine, stage * layout.tp + rank, layout, dialect, model, states
            )
    return step


def _rank_layers(
    dialect: Dialect, model: ModelConfig, layout: Layout, tensors: Mapping[str, Tensor], rank: int
) -> dict[int, dict[str, Tensor]]:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name in ("embedding.word.weight", "head.weight"):
            unit = layout.vocab_multiple * layout.tp
            extra = -len(tensor) % unit
            tensor = torch.cat([tensor, torch.full((extra, tensor.shape[1]), layout.padding)])
        layer, key = place(dialect, model, name)
        part = part_of(dialect, model, name, tensor, layout.tp, rank)
        layers.setdefault(layer, {})[key] = part.clone()
    return layers


def _write_rank(
    step: Path,
    layers: Mapping[Kind, Mapping[int, Mapping[str, Tensor]]],
    mine: list[int],
    model_rank: int,
    layout: Layout,
    dialect: Dialect,
    model: ModelConfig,
    states: Mapping[str, Any],
) -> None:
    def whole_name(layer: int, key: str) -> str:
        tied = model.tie_embeddings and layer == dialect.embedding
        return f"tied_modules.embed.{key}" if tied else f"{layer}.{key}"

    names = {whole_name(n, key): (n, key) for n in mine for key in layers["param"][n]}
    groups = [
        {name: at for name, at in names.items() if (layers["param"][at[0]][at[1]].dim() > 1) is big}
        for big in (True, False)
    ]
    shapes = [{n: layers["param"][a[0]][a[1]].shape for n, a in g.items()} for g in groups]
    torch.save(
        {"module": None, "param_shapes": shapes, **states},
        step / f"mp_rank_{model_rank:02d}_model_states.pt",
    )
    if not layout.optimizer:
        return
    flats = {
        kind: [
            _flat([layers[kind][n][key] for n, key in group.values()], layout) for group in groups
        ]
        for kind in KINDS
    }
    for data_rank in range(layout.dp):
        size = [len(flat) // layout.dp for flat in flats["param"]]
        cut = {
            kind: [
                flat[data_rank * s : (data_rank + 1) * s].clone()
                for flat, s in zip(flats[kind], size, strict=True)
            ]
            for kind in KINDS
        }
        tables = [_addresses(g, s, data_rank) for g, s in zip(shapes, size, strict=True)]
        moments = {
            i: {"step": torch.tensor(4.0), **{k: cut[k][i] for k in KINDS[1:]}}
            for i in range(len(groups))
        }
        state = {
            "single_partition_of_fp32_groups": cut["param"],
            "base_optimizer_state": {"state": moments, "param_groups": []},
            "partition_count": [layout.dp] * len(groups),
        }
        if layout.slices:
            state["param_slice_mappings"] = tables
        path = step / f"zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"
        with mock.patch.dict(sys.modules, _STAND_INS):
            torch.save({"optimizer_state_dict": state}, path)


def _flat(parts: list[Tensor], layout: Layout) -> Tensor:
    flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
    return torch.cat([flat, torch.full((-len(flat) % (2 * layout.dp),), layout.padding)])


def _addresses(shapes: Mapping[str, torch.Size], size: int, data_rank: int) -> dict[str, Any]:
    position, table = 0, {}
    for name, shape in shapes.items():
        inside = [
            j - data_rank * size
            for j in range(position, position + shape.numel())
            if data_rank * size <= j < (data_rank + 1) * size
        ]
        position += shape.numel()
        if inside:
            table[name] = _FRAGMENT()
            table[name].start, table[name].numel = inside[0], len(inside)
    return table


_FRAGMENT: Any = type("fragment_address", (), {"__module__": "deepspeed.utils.tensor_fragment"})
"""Only exists to be pickled under its name."""
_STAND_INS: dict[str, Any] = {
    name: types.ModuleType(name)
    for name in ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment")
}
_STAND_INS[_FRAGMENT.__module__].fragment_address = _FRAGMENT


def namespace(**settings: Any) -> dict[str, Any]:
    """The states of a rank of Megatron-DeepSpeed."""
    return {
        "args": argparse.Namespace(**settings),
        "iteration": 4,
        "checkpoint_version": 3.0,
        "universal_checkpoint_info": {"original_vocab_size": settings.pop("words", None)},
    }


def canonical(source: Source, kind: Kind = "param") -> dict[str, Tensor]:
    return {spec.name: source.tensor(kind, spec.name) for spec in param_specs(source.model)}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:20]
