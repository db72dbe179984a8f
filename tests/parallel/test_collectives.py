"""Each collective against plain torch on the list of all ranks' tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from tests.distributed import Workers, mesh_for

SHAPE = (12, 5)


def value(rank: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Small integers, so that sums are exact in any order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def axis_of(rank: int, world: int) -> Axis:
    return mesh_for(ParallelLayout(tp=world), rank).tp


def reductions(rank: int, world: int) -> dict[str, Tensor]:
    axis, results = axis_of(rank, world), {}
    for op in ("sum", "max", "min"):
        tensor = value(rank)
        assert collectives.all_reduce(tensor, axis, op) is tensor
        results[op] = tensor
        tensor = value(rank)
        collectives.all_reduce_async(tensor, axis, op).wait()
        results[f"{op} async"] = tensor
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce(workers: Workers, world: int) -> None:
    stack = torch.stack([value(rank) for rank in range(world)])
    for got in workers(world).run(reductions):
        for suffix in ("", " async"):
            assert torch.equal(got["sum" + suffix], stack.sum(0))
            assert torch.equal(got["max" + suffix], stack.amax(0))
            assert torch.equal(got["min" + suffix], stack.amin(0))
        assert not torch.equal(got["sum"], got["max"])


def dim0(rank: int, world: int, *, strided: bool) -> dict[str, Tensor]:
    """`strided`: the same values in memory that is not contiguous."""
    axis, x = axis_of(rank, world), value(rank)
    if strided:
        x = x.t().contiguous().t()
        assert not x.is_contiguous()
    kept = x.clone()
    gathered, gathering = collectives.all_gather_dim0_async(x, axis)
    scattered, scattering = collectives.reduce_scatter_dim0_async(x, axis)
    gathering.wait()
    scattering.wait()
    results = {
        "gather": collectives.all_gather_dim0(x, axis),
        "gather async": gathered,
        "scatter": collectives.reduce_scatter_dim0(x, axis),
        "scatter async": scattered,
    }
    assert torch.equal(x, kept), "the input was changed"
    return results


def dim0_strided(rank: int, world: int) -> dict[str, Tensor]:
    return dim0(rank, world, strided=True)


def dim0_contiguous(rank: int, world: int) -> dict[str, Tensor]:
    return dim0(rank, world, strided=False)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fn", [dim0_contiguous, dim0_strided])
def test_dim0_versions(workers: Workers, world: int, fn: Callable[..., dict[str, Tensor]]) -> None:
    values = [value(rank) for rank in range(world)]
    shares = torch.stack(values).sum(0).chunk(world)
    for rank, got in enumerate(workers(world).run(fn)):
        for suffix in ("", " async"):
            assert torch.equal(got["gather" + suffix], torch.cat(values))
            assert torch.equal(got["scatter" + suffix], shares[rank])


def test_uneven_shares_are_refused() -> None:
    axis = Axis("tp", 4, 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"dim 0 of \(6, 2\) is not a multiple of 4"):
        collectives.reduce_scatter_dim0(torch.zeros(6, 2), axis)


def flat(rank: int, world: int, native: bool) -> list[Tensor]:
    """Reduce-scatter in place; then everything but the own chunk is spoiled and gathered again.

    `native`: through the primitives that other backends than gloo use.
    """
    axis, buffer = axis_of(rank, world), value(rank, (world * 6,))
    whole = buffer.data_ptr()
    original = collectives._is_gloo
    if native:
        collectives._is_gloo = lambda axis: False
    try:
        collectives.reduce_scatter_flat_async(buffer, axis).wait()
        mine = buffer.view(world, -1)[rank].clone()
        buffer.fill_(-1000.0)
        buffer.view(world, -1)[rank] = mine
        collectives.all_gather_flat_async(buffer, axis).wait()
    finally:
        collectives._is_gloo = original
    assert buffer.data_ptr() == whole
    return [mine, buffer]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("native", [False, True])
def test_flat_versions_work_in_place(workers: Workers, world: int, native: bool) -> None:
    total = torch.stack([value(rank, (world * 6,)) for rank in range(world)]).sum(0)
    for rank, (mine, buffer) in enumerate(workers(world).run(flat, native)):
        assert torch.equal(mine, total.chunk(world)[rank])
        assert torch.equal(buffer, total)


def many_at_once(rank: int, world: int) -> list[Tensor]:
    """Several buckets under way together, waited for in the other order."""
    axis = axis_of(rank, world)
    buckets = [value(10 * i + rank, (world * (i + 1),)) for i in range(5)]
    handles = [collectives.reduce_scatter_flat_async(bucket, axis) for bucket in buckets]
    for handle in reversed(handles):
        handle.wait()
    return [bucket.view(world, -1)[rank].clone() for bucket in buckets]


def test_buckets_in_flight_do_not_mix(workers: Workers) -> None:
    for rank, got in enumerate(workers(4).run(many_at_once)):
        for i, chunk in enumerate(got):
            total = torch.stack([value(10 * i + r, (4 * (i + 1),)) for r in range(4)]).sum(0)
            assert torch.equal(chunk, total.chunk(4)[rank])


def from_one(rank: int, world: int, layout: ParallelLayout, name: str, source: int) -> list[object]:
    axis = getattr(mesh_for(layout, rank), name)
    objects = collectives.all_gather_object({"rank": rank}, axis)
    return [collectives.broadcast_object(("from", rank), axis, source), objects]


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_a_source_is_a_place_on_the_axis_not_a_rank(
    workers: Workers, name: str, source: int
) -> None:
    """On four ranks as 2 x 2 the dp groups are 0, 2 and 1, 3."""
    results = workers(4).run(from_one, ParallelLayout(tp=2, dp=2), name, source)
    for rank, (sent, objects) in enumerate(results):
        peers = [rank // 2 * 2, rank // 2 * 2 + 1] if name == "tp" else [rank % 2, rank % 2 + 2]
        assert sent == ("from", peers[source])
        assert objects == [{"rank": peer} for peer in peers]


def arrive_late(rank: int, world: int) -> tuple[float, float]:
    """(when this rank reached the barrier, when it left it); the last rank is late."""
    axis = axis_of(rank, world)
    time.sleep(0.2 if rank == world - 1 else 0.0)
    reached = time.monotonic()
    collectives.barrier(axis)
    return reached, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(workers: Workers) -> None:
    times = workers(2).run(arrive_late)
    last = max(reached for reached, _ in times)
    assert all(left >= last for _, left in times)


def test_an_axis_of_one_does_nothing() -> None:
    """No process group exists here: a collective that was issued would raise."""
    assert not torch.distributed.is_initialized()
    axis, x = Axis("dp"), value(0)
    kept = x.clone()
    for fn in (
        collectives.all_reduce,
        collectives.all_gather_dim0,
        collectives.reduce_scatter_dim0,
    ):
        assert fn(x, axis) is x
    for fn in (collectives.all_gather_dim0_async, collectives.reduce_scatter_dim0_async):
        result, handle = fn(x, axis)
        handle.wait()
        assert result is x
    for fn in (
        collectives.all_reduce_async,
        collectives.reduce_scatter_flat_async,
        collectives.all_gather_flat_async,
    ):
        fn(x, axis).wait()
    collectives.barrier(axis)
    thing = object()
    assert collectives.all_gather_object(thing, axis) == [thing]
    assert collectives.broadcast_object(thing, axis) is thing
    assert torch.equal(x, kept)


def test_a_handle_waits_once_for_each_work() -> None:
    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    works = [Work(), Work()]
    handle = Handle([works[0], None, works[1]])
    handle.wait()
    handle.wait()
    assert [work.waits for work in works] == [1, 1]
