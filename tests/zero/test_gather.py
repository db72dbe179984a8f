"""ZeRO stage 3: which parameters are there when, and how often they are gathered.

Two ranks train the toy; what is looked at is where memory is and which collectives are begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megads.config.schema import OptimConfig
from megads.kernels.reference import adamw
from megads.optim.update import make_update_rule
from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.parallel.sharding import Init, ParamSpec
from megads.parallel.units import UnitHooks, after_unit, before_unit
from megads.zero.buckets import Bucket, Entry, build_buckets
from megads.zero.optimizer import ZeroOptimizer
from megads.zero.shards import Offload
from tests.distributed import Workers, mesh_for

WIDTH, UNITS = 11, 6
NAMES = tuple(f"u{n}" for n in range(UNITS))
NEIGHBOURS = {(a,) for a in NAMES} | set(itertools.pairwise(NAMES))
THREE = set(zip(NAMES, NAMES[1:], NAMES[2:], strict=False))
CONFIG = OptimConfig(lr=0.01, weight_decay=0.1)


class Chain(nn.Module):
    """Matrices in a row, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            weight = torch.empty(WIDTH, WIDTH, device="meta")
            self.register_parameter(name, nn.Parameter(weight))
        self.specs = {n: ParamSpec(n, (WIDTH, WIDTH), "matrix", Init()) for n in NAMES}
        self.units = {name: (name,) for name in NAMES}
        self.unit_hooks: UnitHooks | None = None
        self.announcements = 1
        self.look: Callable[[str], None] = lambda unit: None

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            for _ in range(self.announcements):
                before_unit(name, self.unit_hooks)
            self.look(name)
            x = torch.tanh(x @ getattr(self, name))
            for _ in range(self.announcements):
                after_unit(name, x, self.unit_hooks)
            if x.requires_grad:
                x.register_hook(lambda _, name=name: self.look(name))
        return x.square().sum()


class Run:
    """The chain under stage 3, and what is there and gathered at each point."""

    def __init__(self, rank: int, world: int, offload: str, directory: Path, numel: int) -> None:
        mesh = mesh_for(ParallelLayout(dp=world), rank, zero_shard_size=world)
        self.model = Chain()
        self.buckets = build_buckets(
            [self.model], mesh, dtype=torch.float32, bucket_numel=numel, sequence_parallel=False
        )
        self.rank, self.gathered, self.resident = rank, [], []
        self.optimizer = ZeroOptimizer(
            [self.model],
            self.buckets,
            mesh,
            make_update_rule(CONFIG, adamw),
            CONFIG,
            stage=3,
            initialize=initialize,
            offload=Offload(offload, directory, 1),  # type: ignore[arg-type]
        )
        self.model.look = self.look

    def units_of(self, bucket: Bucket) -> list[str]:
        return [entry.name for entry in reversed(bucket.entries)]

    def there(self) -> list[str]:
        """Units whose parameters have memory, in forward order."""
        return sorted(u for b in self.buckets if b.params.nbytes for u in self.units_of(b))

    def look(self, unit: str) -> None:
        there = self.there()
        assert unit in there and not getattr(self.model, unit).isnan().any()
        self.resident.append(tuple(there))

    def step(self, microbatches: int = 2) -> None:
        self.optimizer.zero_grad()
        for m in range(microbatches):
            loss = self.model(torch.linspace(-1, 1 + self.rank + m, WIDTH).expand(3, -1))
            self.optimizer.gradients.before_backward(0, is_last=m == microbatches - 1)
            loss.backward()
            self.optimizer.gradients.after_backward(0)
        self.optimizer.finish_gradients()
        self.optimizer.step(CONFIG.lr)

    def recording(self) -> Callable[[], None]:
        original = collectives.all_gather_flat_async

        def all_gather(flat: Tensor, axis: Axis) -> Handle:
            (bucket,) = (b for b in self.buckets if b.params.tensor is flat)
            self.gathered.append(self.units_of(bucket))
            return original(flat, axis)

        collectives.all_gather_flat_async = all_gather  # type: ignore[assignment]
        return lambda: setattr(collectives, "all_gather_flat_async", original)


def initialize(entry: Entry) -> None:
    source = torch.Generator().manual_seed(int(entry.name[1:]))
    entry.param.data.copy_(torch.randn(WIDTH, WIDTH, generator=source) / 4)


def observe(
    rank: int, world: int, offload: str, directory: Path, numel: int, announcements: int
) -> dict[str, Any]:
    run = Run(rank, world, offload, directory, numel)
    run.model.announcements = announcements
    undo = run.recording()
    after_make, after_step = run.there(), []
    try:
        for _ in range(2):
            run.step()
            after_step.append((run.there(), [b.grads.nbytes for b in run.buckets]))
        per_step = len(run.gathered) // 2
        with torch.no_grad():
            run.model(torch.ones(1, WIDTH))
        evaluated = run.gathered[2 * per_step :]
        run.optimizer.publish()
        weights = []
        for piece in run.optimizer.pieces(only_owned=False, kinds=["param"]):
            with piece.opened() as data:
                weights.append(data.clone())
        return {
            "after_make": after_make,
            "after_step": after_step,
            "resident": run.resident,
            "gathered": run.gathered[: 2 * per_step],
            "evaluated": evaluated,
            "after_publish": run.there(),
            "weights": weights,
        }
    finally:
        undo()
        run.optimizer.close()


@pytest.mark.parametrize("offload, most", [("none", 2), ("cpu", 2), ("nvme", 3)])
def test_only_neighbouring_units_are_there_at_once(
    workers: Workers, tmp_path: Path, offload: str, most: int
) -> None:
    """From a file, the third one's shard is being read while the second one is gathered."""
    allowed = NEIGHBOURS | THREE if most == 3 else NEIGHBOURS
    for got in workers(2).run(observe, offload, tmp_path, 1, 1):
        assert got["after_make"] == [] and got["after_publish"] == []
        for there, grads in got["after_step"]:
            assert there == [] and not any(grads)
        assert set(got["resident"]) <= allowed
        assert max(map(len, got["resident"])) == most, "too little is on its way"


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_the_last_unit_of_a_forward_is_not_gathered_again_for_its_backward(
    workers: Workers, tmp_path: Path, offload: str
) -> None:
    """And neither is the first one of a backward for the next microbatch's forward."""
    forward = [[name] for name in NAMES]
    first = [*forward, *reversed(forward[:-1])]
    step = [*first, *forward[1:], *reversed(forward[:-1])]
    for got in workers(2).run(observe, offload, tmp_path, 1, 1):
        assert got["gathered"] == 2 * step
        assert got["evaluated"] == forward


def test_units_in_one_bucket_are_gathered_once(workers: Workers, tmp_path: Path) -> None:
    pairs = [[NAMES[n], NAMES[n + 1]] for n in range(0, UNITS, 2)]
    step = [*pairs, *reversed(pairs[:-1]), *pairs[1:], *reversed(pairs[:-1])]
    for got in workers(2).run(observe, "none", tmp_path, 256, 1):
        assert got["gathered"] == 2 * step
        assert all(there == [] for there, _ in got["after_step"])


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_a_unit_that_is_announced_twice_changes_nothing(
    workers: Workers, tmp_path: Path, offload: str
) -> None:
    once = workers(2).run(observe, offload, tmp_path, 1, 1)
    twice = workers(2).run(observe, offload, tmp_path, 1, 2)
    for a, b in zip(once, twice, strict=True):
        assert a["gathered"] == b["gathered"]
        assert all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))


def test_offload_does_not_change_a_bit(workers: Workers, tmp_path: Path) -> None:
    """Where parameters wait is nothing that a result depends on."""
    (plain, _), *others = (
        workers(2).run(observe, offload, tmp_path, 1, 1) for offload in ("none", "cpu", "nvme")
    )
    for other, _ in others:
        pairs = zip(plain["weights"], other["weights"], strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def never_released(rank: int, world: int, directory: Path) -> dict[str, Any]:
    from megads.zero.gather import ParamGatherer

    original = ParamGatherer._release_all_but
    ParamGatherer._release_all_but = lambda self, kept: None  # type: ignore[method-assign]
    try:
        return observe(rank, world, "none", directory, 1, 1)
    finally:
        ParamGatherer._release_all_but = original  # type: ignore[method-assign]


def test_negative_control_parameters_that_stay_are_noticed(
    workers: Workers, tmp_path: Path
) -> None:
    for got in workers(2).run(never_released, tmp_path):
        assert not set(got["resident"]) <= NEIGHBOURS and got["after_step"][0][0] == list(NAMES)
