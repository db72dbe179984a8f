"""Whole training runs inside the worker pools, and what they left behind."""

from __future__ import annotations

import copy
import functools
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors import safe_open
from torch import Tensor

from megads.config.compose import compose
from megads.config.decode import decode
from megads.config.schema import Config
from megads.data.indexed import TokenWriter
from megads.errors import BadStepError
from megads.launch.env import RankInfo
from tests.distributed import Workers

# Sizes that no two things share: 5 layers, a prime vocabulary, KV heads != heads != head size,
# a feed-forward width that is not a multiple of the hidden size.
SIZES = [
    "model.num_layers=5",
    "model.hidden_size=24",
    "model.num_attention_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=10",
    "model.ffn_hidden_size=44",
    "model.vocab_size=101",
    "model.vocab_multiple=8",
    "model.max_seq_length=16",
]
FAMILIES = {
    "gpt": ["model.norm=layernorm", "model.activation=gelu_tanh", "model.position=learned"],
    "llama": [
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.position=rope",
        "model.qkv_bias=false",
        "model.attn_out_bias=false",
        "model.mlp_bias=false",
        "model.qk_norm=true",
        "model.tie_embeddings=false",
    ],
    "bloom": ["model.position=alibi", "model.embedding_norm=true", "model.vocab_multiple=128"],
    "neox": [
        "model.position=rope",
        "model.rope_fraction=0.4",
        "model.parallel_residual=true",
        "model.tie_embeddings=false",
    ],
}
RUN = [
    "train.steps=20",
    "train.seq_length=16",
    "train.micro_batch_size=4",
    "train.global_batch_size=8",
    "optim.lr=3e-3",
    "optim.min_lr=3e-4",
    "optim.total=20",
    "optim.warmup=3",
    "optim.clip=0.5",
    "model.init_std=0.1",
    "eval.every=0",
    "checkpoint.every=0",
    "checkpoint.save_last=false",
    "logging.every=1",
]

OVERRIDES = OverridesParser.create()


def write_tokens(prefix: Path, *, vocab_size: int = 101, documents: int = 40) -> str:
    """A token file in which the next token can be learned a little; returns its prefix."""
    rng = np.random.default_rng(5)
    with TokenWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            length = int(rng.integers(5, 120))
            tokens = rng.integers(0, vocab_size, length)
            repeats = rng.random(length) < 0.5
            tokens[1:] = np.where(repeats[1:], (tokens[:-1] * 7 + 3) % vocab_size, tokens[1:])
            writer.add_document(tokens)
    return str(prefix)


def command_words(run_dir: Path, data: str, family: str, *overrides: str) -> list[str]:
    """The command line of a small run of `family`; of repeated keys the last one counts."""
    wanted = [*SIZES, *FAMILIES[family], *RUN, f"run.dir={run_dir}", f"data.paths=[{data}]"]
    return list({o.split("=", 1)[0]: o for o in [*wanted, *overrides]}.values())


@functools.cache
def _composed(family: str, groups: tuple[str, ...]) -> dict[str, Any]:
    return compose(command_words(Path("run"), "data", family, *groups)).model_dump()


def tiny_config(run_dir: Path, data: str, family: str, *overrides: str) -> Config:
    """The configuration of a small run of `family` in fp32, the same whatever the layout.

    That of `command_words`, but composed once for each choice of groups: composing costs as much
    as a short run. Single settings are then put where they belong.
    """
    groups = [word for word in overrides if "." not in word.split("=", 1)[0]]
    settings = [f"run.dir={run_dir}", f"data.paths=[{data}]"]
    settings += [word for word in overrides if word not in groups]
    values = copy.deepcopy(_composed(family, tuple(groups)))
    for override in OVERRIDES.parse_overrides(settings):
        *path, name = override.key_or_group.split(".")
        place = functools.reduce(operator.getitem, path, values)
        assert name in place, override.input_line
        place[name] = override.value()
    return decode(values)


def world_size(config: Config) -> int:
    parallel = config.parallel
    return parallel.tp * parallel.pp * (parallel.dp or 1)


def pool_info(rank: int, world: int) -> RankInfo:
    return RankInfo(rank, world, rank, world, 0, "cpu", "gloo", "", 0, "torchrun")


def train_rank(
    rank: int, world: int, config: Config, before: Callable[..., Any] | None, *args: Any
) -> int | str:
    """One rank of a run: its exit status, or the error that all ranks stop for alike.

    `before(rank, *args)` may spoil something and returns how to undo it.
    """
    from megads.train.loop import train

    undo = before(rank, *args) if before is not None else None
    try:
        return train(config, pool_info(rank, world))
    except BadStepError as error:
        return f"BadStepError: {error}"
    finally:
        if undo is not None:
            undo()


def run_training(
    workers: Workers, config: Config, before: Callable[..., Any] | None = None, *args: Any
) -> list[dict[str, Any]]:
    """Train in a pool of the layout's size; the lines of metrics.jsonl."""
    assert set(train_statuses(workers, config, before, *args)) == {0}
    return read_metrics(Path(config.run.dir))


def train_statuses(
    workers: Workers, config: Config, before: Callable[..., Any] | None = None, *args: Any
) -> list[int | str]:
    """Train in a pool of the layout's size; what `train_rank` returned on each rank."""
    return workers(world_size(config)).run(train_rank, config, before, *args, timeout=120)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def column(lines: Sequence[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([line[name] for line in lines if name in line], dtype=torch.float64)


def assert_same_curve(
    got: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]], rtol: float = 1e-5
) -> None:
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(column(got, name), column(want, name), rtol=rtol, atol=0)


def gathered_weights(rank: int, world: int, config: Config, kinds: Sequence[str]) -> Any:
    """Every rank's owned pieces right after building the run: (key, global shape, offset, data)."""
    from megads.train.build import build

    parts = build(config, pool_info(rank, world))
    held = []
    for p in parts.optimizer.pieces(only_owned=True, kinds=kinds):
        with p.opened() as data:
            held.append((p.key, p.global_shape, p.offset, data.clone()))
    parts.loader.close()
    parts.metrics.close(0)
    parts.close()
    return held


def assemble(per_rank: Sequence[Any]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' pieces; every element must be there exactly once."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for key, shape, offset, data in (piece for pieces in per_rank for piece in pieces):
        index = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
        whole.setdefault(key, torch.full(shape, float("nan")))[index] = data
        seen.setdefault(key, torch.zeros(shape, dtype=torch.int))[index] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
    return whole


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint from its safetensors files alone: pieces are "key@offsets"."""
    shapes = json.loads((path / "manifest.json").read_text())["tensors"]
    pieces = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                key, _, offset = name.rpartition("@")
                shape = tuple(shapes[key]["shape"])
                pieces.append(
                    (key, shape, tuple(map(int, offset.split(","))), tensors.get_tensor(name))
                )
    return assemble([pieces])
