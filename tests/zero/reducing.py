"""Buckets of which every reduction is recorded, for one process.

The collectives are replaced by a log that notes which bucket a reduction was started for and what
the bucket held at that moment. The made-up peers contribute the same as this process,
so a sum is twice what was given here. The oracle is a plain sum per parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.mesh import Axis, Mesh
from megads.parallel.sharding import Init, ParamSpec
from megads.zero.buckets import Bucket, Flat, build_buckets
from megads.zero.grads import BucketReducer, BucketSink, GradientBuckets

Way = Literal["add", "outer", "rows", "autograd"]
WAYS: tuple[Way, ...] = ("add", "outer", "rows", "autograd")
ROWS, COLUMNS = 3, 4
NAMES = tuple("abcdefgh")
MATRIX = ParamSpec("", (ROWS, COLUMNS), "matrix", Init())
NAN = float("nan")


class Mode(NamedTuple):
    """What `ZeroOptimizer` tells the reducers: `shards` ranks of which this is the last one;
    the shard has memory of its own; the bucket keeps its memory and is reduced once a step."""

    shards: int = 1
    moves: bool = False
    keeps: bool = True


STAGE0, STAGE1, STAGE2 = Mode(), Mode(2), Mode(2, moves=True, keeps=False)
MODES = {
    "stage 0": STAGE0,
    "stage 1": STAGE1,
    "stage 0 offload": Mode(1, moves=True),
    "stage 1 offload": Mode(2, moves=True),
    "stage 2 or 3": STAGE2,
    "stage 2 or 3 over 4": Mode(4, moves=True, keeps=False),
    "stage 2 or 3 alone": Mode(1, moves=True, keeps=False),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Log:
    """Stands in for the reductions; `events` are buckets (by number) and units in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, Tensor]] = []
        self.calls: set[tuple[str, str]] = set()
        self.buckets: list[Bucket] = []
        self.events: list[int | str] = []
        for name in ("all_reduce_async", "reduce_scatter_flat_async"):
            monkeypatch.setattr(collectives, name, self._replacement(name))
        acquire = Flat.acquire

        def acquire_garbage(flat: Flat) -> None:
            is_new = not flat.nbytes
            acquire(flat)
            if is_new:  # nobody may read what was there before; gaps are promised to be zeros
                gaps = [slice(gap.start, gap.stop) for gap in flat._gaps]
                kept = [flat.tensor[gap].clone() for gap in gaps]
                flat.tensor.fill_(NAN)
                for gap, zeros in zip(gaps, kept, strict=True):
                    flat.tensor[gap] = zeros

        monkeypatch.setattr(Flat, "acquire", acquire_garbage)

    def _replacement(self, name: str) -> Callable[..., Handle]:
        def start(flat: Tensor, axis: Axis) -> Handle:
            (number,) = (n for n, b in enumerate(self.buckets) if b.grads.tensor is flat)
            self.started.append((number, flat.clone()))
            self.events.append(number)
            self.calls.add((name, axis.name))
            return Arriving(self.buckets[number], axis)

        return start

    def held(self, bucket: Bucket) -> list[Tensor]:
        """What `bucket` held at each start of its reduction."""
        return [held for number, held in self.started if self.buckets[number] is bucket]


class Arriving(Handle):
    """The sum is there after the wait, and of other ranks' parts nothing can be said."""

    def __init__(self, bucket: Bucket, axis: Axis) -> None:
        super().__init__()
        self._bucket, self._axis = bucket, axis

    def wait(self) -> None:
        flat = self._bucket.grads.tensor
        assert self._bucket.grads.nbytes, "released before the reduction has ended"
        start, stop = self._bucket.plan.part(self._axis.size, self._axis.index)
        for _, place in self._bucket.placed():
            flat[place.start : min(start, place.stop)] = NAN
            flat[max(start, place.start) : min(stop, place.stop)] *= 2
            flat[max(stop, place.start) : place.stop] = NAN


class Model:
    """Parameters in buckets, in the order in which their gradients come; each is a unit."""

    def __init__(
        self,
        log: Log,
        specs: Sequence[ParamSpec],
        *,
        mode: Mode = STAGE0,
        mesh: Mesh | None = None,
        per_bucket: int = 100,
        chunks: int = 1,
        units: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.mesh, self.log, self.mode = with_shards(mesh or Mesh.single(), mode.shards), log, mode
        self.modules = [nn.Module() for _ in range(chunks)]
        for module in self.modules:
            module.specs, module.units = {}, {}  # type: ignore[assignment]
        for i, spec in enumerate(reversed(specs)):
            module = self.modules[i * chunks // len(specs)]
            param = torch.empty(spec.local_shape(self.mesh.tp.size), device="meta")
            module.register_parameter(spec.name, nn.Parameter(param))
            module.specs[spec.name] = spec  # type: ignore[index, operator]
            module.units[f"unit {spec.name}"] = (spec.name,)  # type: ignore[index, operator]
        if units is not None:
            self.modules[0].units = units  # type: ignore[assignment]
        self.buckets = log.buckets = build_buckets(
            self.modules,
            self.mesh,
            dtype=torch.float32,
            bucket_numel=per_bucket * 64,
            sequence_parallel=True,
        )
        self.shards = [self._shard(bucket) for bucket in self.buckets]
        reducers = [
            BucketReducer(b, self.mesh, shard, moves=mode.moves, keeps=mode.keeps)
            for b, shard in zip(self.buckets, self.shards, strict=True)
        ]
        self.sync = GradientBuckets(
            reducers, self.mesh, every_backward=not mode.keeps, promptly=mode.moves
        )
        self.sync.reset()

    def _shard(self, bucket: Bucket) -> Tensor:
        start, stop = bucket.plan.part(self.mesh.shard.size, self.mesh.shard.index)
        if self.mode.moves:
            return torch.full((stop - start,), NAN)
        bucket.grads.acquire()
        return bucket.grads.tensor[start:stop]

    def param(self, name: str) -> nn.Parameter:
        return next(p for m in self.modules for n, p in m.named_parameters() if n == name)

    def sink(self, name: str) -> BucketSink:
        return self.param(name).grad_sink  # type: ignore[return-value]

    def bucket(self, name: str) -> Bucket:
        return next(b for b in self.buckets if name in [e.spec.name for e in b.entries])

    def given(self, name: str, held: Tensor) -> Tensor:
        """This parameter's part of what its bucket held."""
        for entry, place in self.bucket(name).placed():
            if entry.spec.name == name:
                return held[place.start : place.stop].view(entry.param.shape)
        raise KeyError(name)

    def reduced(self, name: str) -> tuple[Tensor, slice]:
        """This parameter's part of the shard, and which of its elements that is."""
        bucket = self.bucket(name)
        first, last = bucket.plan.part(self.mesh.shard.size, self.mesh.shard.index)
        shard = next(s for b, s in zip(self.buckets, self.shards, strict=True) if b is bucket)
        for entry, place in bucket.placed():
            if entry.spec.name == name:
                low, high = max(first, place.start), max(first, min(last, place.stop))
                low = min(low, high)
                return shard[low - first : high - first], slice(
                    low - place.start, high - place.start
                )
        raise KeyError(name)

    def backward(
        self, ways: Mapping[str, Way], seed: int, *, is_last: bool, chunk: int = 0
    ) -> dict[str, Tensor]:
        """One microbatch through a chunk: its units in backward order, with what is in `ways`."""
        given = {}
        self.sync.before_backward(chunk, is_last=is_last)
        units: dict[str, tuple[str, ...]] = self.modules[chunk].units  # type: ignore[assignment]
        for unit, names in reversed(units.items()):
            self.begin(unit)
            for name in (n for n in reversed(names) if n in ways):
                given[name] = self.contribute(name, ways[name], seed + NAMES.index(name))
        self.sync.after_backward(chunk)
        return given

    def begin(self, unit: str) -> None:
        self.log.events.append(unit)
        self.sync.before_unit(unit)

    def contribute(self, name: str, way: Way, seed: int) -> Tensor:
        """One gradient of `name`, by one of the ways in which layers give it; returns it."""
        source = torch.Generator().manual_seed(seed)

        def ints(*shape: int) -> Tensor:
            return torch.randint(-5, 6, shape, generator=source).float()

        sink, (rows, columns) = self.sink(name), self.param(name).shape
        if way == "outer":
            grad_output, inputs = ints(6, rows), ints(6, columns)
            sink.add_outer(grad_output, inputs)
            return grad_output.t() @ inputs
        grad = ints(rows, columns)
        if way == "add":
            sink.add(grad)
        elif way == "autograd":
            self.bucket(name).params.acquire()
            (self.param(name) * grad).sum().backward()
            assert self.param(name).grad is None
        else:
            which, values = torch.randint(rows, (5,), generator=source), ints(5, columns)
            sink.add_rows(which, values)
            grad = nn.functional.one_hot(which, rows).float().t() @ values
        return grad


def with_shards(mesh: Mesh, shards: int) -> Mesh:
    """A mesh whose dp ranks, all of them but this one made up, shard."""
    ranks = tuple(range(shards))
    axis = Axis("dp", shards, shards - 1, ranks)
    return dataclasses.replace(mesh, dp=axis, shard=dataclasses.replace(axis, name="shard"))


def named(name: str, spec: ParamSpec = MATRIX, **changes: object) -> ParamSpec:
    return dataclasses.replace(spec, name=name, **changes)  # type: ignore[arg-type]


def zeros(names: Sequence[str] = NAMES) -> dict[str, Tensor]:
    return {name: torch.zeros(ROWS, COLUMNS) for name in names}


def check(model: Model, per_microbatch: Sequence[Mapping[str, Tensor]]) -> None:
    """Every bucket was reduced when it held complete sums, of the step or of a microbatch, and the
    shard has twice the sum over the step. `per_microbatch`: what each gave to each parameter."""
    for name in per_microbatch[0]:
        wants = [given[name] for given in per_microbatch]
        total = torch.stack(wants).sum(0)
        helds = [model.given(name, held) for held in model.log.held(model.bucket(name))]
        reductions = [total] if model.mode.keeps else wants
        assert len(helds) == len(reductions)
        for held, want in zip(helds, reductions, strict=True):
            assert torch.equal(held, want), f"{name} was reduced too early"
        got, elements = model.reduced(name)
        assert torch.equal(got, 2 * total.view(-1)[elements]), f"{name} has another sum"
    for bucket, shard in zip(model.buckets, model.shards, strict=True):
        assert bool(bucket.grads.nbytes) == model.mode.keeps
        start, _ = bucket.plan.part(model.mesh.shard.size, model.mesh.shard.index)
        for gap in bucket.grads._gaps:
            assert not shard[max(gap.start - start, 0) : max(gap.stop - start, 0)].any()
