"""Random pairs of layouts: what one saves, the other finds exactly where it belongs.

Ranks of any layout are made in this process, without process groups, as the trainer makes them:
stages, chunks, buckets, ZeRO shards and offload included. Every element of every weight and moment
is another number; what a rank then holds is compared with a model of its own: whole tensors, cut by
the rules of tensor parallelism written down in test_store.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.checkpoint.directory import commit
from megads.checkpoint.manifest import Manifest
from megads.checkpoint.reader import fill_pieces, verify
from megads.checkpoint.reshard import assign_writers
from megads.checkpoint.writer import SavePlan, make_manifest, piece_info, write_share
from megads.config.decode import decode
from megads.config.schema import Config
from megads.config.validate import resolve_layout, validate
from megads.kernels.api import select_kernels
from megads.models.families import param_specs
from megads.models.saved import SavedTensors
from megads.parallel.layout import ParallelLayout
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import ParamSpec
from megads.pipeline.partition import plan_stages
from megads.train.build import DTYPES, build_modules, build_optimizer
from megads.train.memory import shard_size
from megads.zero.optimizer import ZeroOptimizer
from tests.checkpoint.test_store import KINDS, UNTOUCHED, local_shard
from tests.train.test_memory_prediction import alone, mesh_of  # noqa: F401
from tests.training import tiny_config, write_tokens

MODELS, SOURCES, TARGETS = 9, 3, 6
FAMILIES = ("gpt", "llama", "bloom", "neox")


@dataclass
class Rank:
    """One rank of a layout: its optimizer, and what it should hold."""

    optimizer: ZeroOptimizer
    tp: int
    index: int

    def pieces(self, *, saving: bool) -> list[TensorPiece]:
        return list(self.optimizer.pieces(only_owned=saving))

    def fill(self, wholes: dict[str, Tensor] | None) -> None:
        """Set all that is held to what belongs there; without `wholes` to one strange value."""
        for piece in self.pieces(saving=False):
            with piece.opened(write=True) as data:
                if wholes is None:
                    data.fill_(UNTOUCHED)
                else:
                    data.copy_(box(wholes[piece.key], piece))

    def flat(self) -> Iterator[tuple[str, ParamSpec, Tensor, int, int]]:
        """Each parameter's range of each shard as it lies in memory, padding and all."""
        for number, shard in enumerate(self.optimizer._shards):
            for entry, place in shard.bucket.placed():
                low, high = max(shard.start, place.start), min(shard.stop, place.stop)
                if low < high:
                    for kind in KINDS:
                        held = self.optimizer._states.held(
                            number, kind, low - shard.start, high - shard.start
                        )
                        with TensorPiece(
                            kind, torch.float32, (high - low,), (0,), (high - low,), held
                        ).opened() as data:
                            yield (
                                kind,
                                entry.spec,
                                data.clone(),
                                low - place.start,
                                high - place.start,
                            )

    def wipe(self) -> None:
        """One strange value everywhere, padding included."""
        for number, shard in enumerate(self.optimizer._shards):
            for kind in KINDS:
                held = self.optimizer._states.held(number, kind, 0, shard.numel)
                whole = TensorPiece(kind, torch.float32, (shard.numel,), (0,), (shard.numel,), held)
                with whole.opened(write=True) as data:
                    data.fill_(UNTOUCHED)

    def check(self, wholes: dict[str, Tensor]) -> int:
        """Elements that were compared, all of them equal; padding is still what it was."""
        count = 0
        for kind, spec, data, low, high in self.flat():
            want = local_shard(wholes[f"{kind}/{spec.name}"], spec, self.tp, self.index)
            assert torch.equal(data, want.reshape(-1)[low:high]), (kind, spec.name)
            count += data.numel()
        return count


def box(whole: Tensor, piece: TensorPiece) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]


def stamped(specs: tuple[ParamSpec, ...]) -> dict[str, Tensor]:
    """Every element of every tensor is another number, exact in fp32."""
    out, at = {}, 0
    for spec in specs:
        for kind in KINDS:
            out[f"{kind}/{spec.name}"] = torch.arange(
                at, at + spec.numel, dtype=torch.float32
            ).view(spec.shape)
            at += spec.numel
    assert at < 2**24
    return out


def ranks_of(config: Config, layout: ParallelLayout, numbers: Sequence[int]) -> list[Rank]:
    dtype, model = DTYPES[config.precision.name], config.model
    kernels, _ = select_kernels(config.kernels, torch.device("cpu"), dtype)
    plan = plan_stages(model, layout.pp, config.parallel.chunks, config.train.seq_length)
    ranks = []
    for rank in numbers:
        mesh = mesh_of(layout, rank, model.num_kv_heads, shard_size(config, layout.dp))
        modules = build_modules(config, plan, mesh, kernels, dtype, SavedTensors())
        optimizer = build_optimizer(config, modules, mesh, kernels, dtype)
        ranks.append(Rank(optimizer, layout.tp, mesh.tp.index))
    return ranks


def layouts(draw: random.Random, base: dict[str, Any]) -> tuple[Config, ParallelLayout]:
    """A valid configuration of the same model in another form."""
    while True:
        tp, pp, dp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3))
        values = copy.deepcopy(base)
        values["parallel"] |= {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "chunks": draw.choice((1, 2)) if pp > 1 else 1,
            "zero": draw.randrange(4),
            "offload": draw.choice(("none", "none", "cpu", "cpu", "nvme")),
            "bucket_mb": draw.choice((0.004, 0.02, 32.0)),
            "offload_budget_mb": 0.05,
        }
        values["precision"]["name"] = draw.choice(("fp32", "bf16"))
        values["train"] |= {"micro_batch_size": 1, "global_batch_size": 6}
        config = decode(values)
        if tp * pp * dp <= 8 and not validate(config, tp * pp * dp):
            return config, resolve_layout(config, tp * pp * dp)


def save(ranks: list[Rank], config: Config, path: Path, *, copies: bool) -> None:
    """What the store does, for all ranks of this process in turn; all or only owned pieces."""
    held = [rank.pieces(saving=not copies) for rank in ranks]
    tables = [[piece_info(piece) for piece in pieces] for pieces in held]
    plan = SavePlan(1, path, tables, assign_writers(tables))
    files = [
        write_share(plan, number, pieces, max_file_bytes=200_000)
        for number, pieces in enumerate(held)
    ]
    commit(
        path,
        path.with_name("step-1"),
        make_manifest(plan, files, {}, {"model": config.model, "layout": {}}),
    )


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about what a crash leaves."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, data: str) -> list[dict[str, Any]]:
    run = tmp_path_factory.mktemp("run")
    return [tiny_config(run, data, family).model_dump() for family in FAMILIES]


def model_of(draw: random.Random, family: dict[str, Any], place: Path) -> dict[str, Any]:
    """A model of awkward sizes; what is offloaded goes to `place`."""
    values = copy.deepcopy(family)
    values["run"]["dir"] = str(place)
    values["model"] |= {
        "num_layers": 5,
        "hidden_size": 20,
        "head_dim": 6,
        "ffn_hidden_size": 28,
        "num_kv_heads": draw.choice((1, 2, 4)),
        "vocab_size": draw.choice((37, 53)),
        "tie_embeddings": draw.random() < 0.5,
    }
    return values


@pytest.mark.usefixtures("alone", "quick_disk")
@pytest.mark.parametrize("number", range(MODELS))
def test_stamps_land_where_they_belong(
    tmp_path: Path, families: list[dict[str, Any]], number: int
) -> None:
    """A checkpoint of each source layout, loaded in TARGETS others: 162 pairs in all."""
    draw = random.Random(number)
    base = model_of(draw, families[number % len(families)], tmp_path)
    wholes: dict[str, Tensor] = {}
    for source in range(SOURCES):
        config, layout = layouts(draw, base)
        wholes = wholes or stamped(param_specs(config.model))
        place = tmp_path / f"{source}"
        ranks = ranks_of(config, layout, range(layout.world_size))
        for rank in ranks:
            rank.wipe()
            rank.fill(wholes)
        copies = draw.random() < 0.5 and layout.dp == layout.pp == 1
        save(ranks, config, place / ".tmp-step-1-00000000", copies=copies)
        for rank in ranks:
            rank.optimizer.close()
        manifest = verify(place / "step-1")
        stored = sum(torch.Size(t.shape).numel() for t in manifest.tensors.values())
        assert stored == sum(t.numel() for t in wholes.values()), "padding or a copy was counted"
        for _ in range(TARGETS):
            load(place / "step-1", manifest, *layouts(draw, base), wholes, draw)


def load(
    path: Path,
    manifest: Manifest,
    config: Config,
    layout: ParallelLayout,
    wholes: dict[str, Tensor],
    draw: random.Random,
) -> None:
    """Into some ranks of another layout."""
    some = draw.sample(range(layout.world_size), min(2, layout.world_size))
    for rank in ranks_of(config, layout, some):
        rank.wipe()
        fill_pieces(path, manifest, rank.pieces(saving=False))
        assert rank.check(wholes)
        rank.optimizer.close()


@pytest.mark.usefixtures("alone", "quick_disk")
@pytest.mark.parametrize(
    "key", ["param/blocks.3.mlp.down.weight", "exp_avg_sq/blocks.0.attn.qkv.weight"]
)
def test_negative_control_a_piece_that_is_one_off_is_seen(
    tmp_path: Path, families: list[dict[str, Any]], key: str
) -> None:
    draw = random.Random(1)
    config, layout = layouts(draw, model_of(draw, families[0], tmp_path))
    wholes = stamped(param_specs(config.model))
    ranks = ranks_of(config, layout, range(layout.world_size))
    for rank in ranks:
        rank.wipe()
        rank.fill(wholes)
        rank.check(wholes)
    moved = wholes | {key: wholes[key].roll(1)}
    for rank in ranks:
        rank.fill(moved)
    with pytest.raises(AssertionError, match=key.partition("/")[2]):
        for rank in ranks:
            rank.check(wholes)
    for rank in ranks:
        rank.optimizer.close()
