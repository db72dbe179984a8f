"""Saves in the background: what they write, what they wait for, how their failures come out."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.checkpoint import io, snapshot
from megads.checkpoint.store import NICENESS, CheckpointStore
from megads.errors import CheckpointError
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.parallel.pieces import Stored, TensorPiece
from tests.checkpoint.simulation import META, simulate
from tests.distributed import Workers, mesh_for
from tests.training import read_checkpoint

ALONE = Axis("world")


def piece(data: Tensor | Stored, key: str = "param/w") -> TensorPiece:
    shape = (data.numel(),)
    return TensorPiece(key, torch.float32, shape, (0,), shape, data)


def begin(store: CheckpointStore, step: int, *pieces: TensorPiece) -> None:
    store.begin(step, pieces, state={"step": step}, meta=META)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writers wait for it, so that a save stays in flight."""
    opened, real = threading.Event(), io.write_file

    def write_file(path: Path, pieces: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(20)
        return real(path, pieces)

    monkeypatch.setattr(io, "write_file", write_file)
    yield opened
    opened.set()


def test_a_save_in_flight_writes_what_was_there_when_it_began(tmp_path, gate):
    weights = torch.arange(5.0)
    store = CheckpointStore(tmp_path, ALONE)
    begin(store, 1, piece(weights))
    weights += 100
    assert store.steps() == [] and not store.failed
    gate.set()
    assert store.wait() == tmp_path / "step-1"
    assert read_checkpoint(tmp_path / "step-1")["param/w"].tolist() == [0, 1, 2, 3, 4]
    assert store.wait() is None


def test_negative_control_without_the_copy_it_would_not(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(snapshot.HostCopies, "take", lambda self, pieces: pieces)
    weights = torch.arange(5.0)
    store = CheckpointStore(tmp_path, ALONE)
    begin(store, 1, piece(weights))
    weights += 100
    gate.set()
    store.wait()
    assert read_checkpoint(tmp_path / "step-1")["param/w"].tolist() == [100, 101, 102, 103, 104]


class Elsewhere(Stored):
    """Values that are in memory only while they are opened."""

    dtype = torch.float32

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def numel(self) -> int:
        return self.values.numel()

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        yield self.values.clone()


def test_stored_pieces_are_on_the_disk_before_training_goes_on(tmp_path, gate):
    stored, held = Elsewhere(torch.arange(4.0)), torch.ones(3)
    store = CheckpointStore(tmp_path, ALONE)
    begin(store, 1, piece(stored, "param/a"), piece(held, "param/b"))
    assert store._copies.nbytes < 128, "only what is in memory is copied"
    stored.values += 7
    held += 7
    gate.set()
    store.wait()
    saved = read_checkpoint(tmp_path / "step-1")
    assert saved["param/a"].tolist() == [0, 1, 2, 3] and saved["param/b"].tolist() == [1, 1, 1]


def test_the_writer_gives_way_to_training(tmp_path, monkeypatch):
    """Niceness is a thread's own: that of the writer is higher, training's stays."""
    seen, real = [], io.write_file

    def write_file(path: Path, pieces: Any) -> Any:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        return real(path, pieces)

    monkeypatch.setattr(io, "write_file", write_file)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    store = CheckpointStore(tmp_path, ALONE)
    begin(store, 1, piece(torch.arange(5.0)))
    store.wait()
    assert seen == [min(mine + NICENESS, 19)] and mine < 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_one_save_is_in_flight_and_one_buffer_is_used(tmp_path):
    weights = torch.zeros(1000)
    store = CheckpointStore(tmp_path, ALONE, keep=-1)
    addresses = set()
    for step in range(1, 6):
        weights += 1
        begin(store, step, piece(weights))
        addresses.add(store._copies._buffer.data_ptr())
        assert store.steps() == list(range(1, step)) or store.steps() == list(range(1, step + 1))
    store.wait()
    assert len(addresses) == 1
    for step in range(1, 6):
        assert set(read_checkpoint(tmp_path / f"step-{step}")["param/w"].tolist()) == {step}


def test_other_sizes_take_another_buffer(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    for step, size in enumerate((1000, 10, 100000), 1):
        begin(store, step, piece(torch.full((size,), float(step))))
        store.wait()
        assert 4 * size <= store._copies.nbytes < 4 * size + 64
        assert len(read_checkpoint(tmp_path / f"step-{step}")["param/w"]) == size


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_a_writer_that_fails_is_named_on_all_ranks(tmp_path, monkeypatch, failing, early):
    real = io.write_file

    def write_file(path, pieces):
        if path.name.startswith(f"rank{failing:05d}") and "step-2" in path.parent.name:
            error = OSError(errno.ENOSPC, "No space left on device")
            raise CheckpointError(f"cannot write {path}: {error}")
        return real(path, pieces)

    monkeypatch.setattr(io, "write_file", write_file)

    def work(world: Axis) -> tuple[str, bool, bool]:
        store = CheckpointStore(tmp_path, world, keep=1)
        data = torch.ones(4)
        mine = piece(Elsewhere(data) if early else data, f"param/{world.index}")
        begin(store, 1, mine)
        begin(store, 2, mine)
        assert store._in_flight is not None
        while not store._in_flight.done():
            pass
        failed = store.failed
        with pytest.raises(CheckpointError) as error:
            store.wait()
        begin(store, 3, mine)  # the next one is tried
        store.wait()
        return str(error.value), failed, store.failed

    for message, failed, after in simulate(2, work):
        assert failed and not after
        assert f"saving step 2: rank {failing}: cannot write {tmp_path}" in message
        assert "[Errno 28] No space left on device" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]


def test_plans_are_made_once_and_again_when_pieces_change(tmp_path, monkeypatch):
    from megads.checkpoint import planner

    made: list[int] = []
    real = planner.assign_writers

    def assign_writers(tables: Any) -> Any:
        made.append(len(tables))
        return real(tables)

    monkeypatch.setattr(planner, "assign_writers", assign_writers)

    def work(world: Axis) -> None:
        store = CheckpointStore(tmp_path, world)
        for step, count in enumerate((2, 2, 2, 3, 3), 1):
            store.save(
                step,
                [piece(torch.full((4,), float(step)), f"param/{i}") for i in range(count)],
                state={},
                meta=META,
            )

    assert simulate(3, work) == [None] * 3
    assert made == [3] * 3 * 2
    assert set(read_checkpoint(tmp_path / "step-5")) == {"param/0", "param/1", "param/2"}


def groups_while_saving(rank: int, world_size: int, path: str) -> list[float]:
    """Collectives of training go on while the saver's threads meet on their own group."""
    import megads.parallel.collectives as collectives

    mesh = mesh_for(ParallelLayout(dp=world_size), rank)
    assert mesh.saving.group is not mesh.world.group and mesh.saving.group is not mesh.dp.group
    store = CheckpointStore(path, mesh.world, saving=mesh.saving, keep=2)
    data, used, real = torch.full((50_000,), float(rank)), [], collectives.dist.all_gather_object

    def all_gather_object(out: Any, obj: Any, group: Any) -> None:
        used.append((threading.current_thread() is threading.main_thread(), group))
        real(out, obj, group=group)

    collectives.dist.all_gather_object = all_gather_object
    try:
        sums = []
        for step in range(1, 6):
            begin(store, step, piece(data, f"param/{rank}"))
            for _ in range(20):
                value = torch.tensor([float(step)])
                sums.append(collectives.all_reduce(value, mesh.world).item())
        store.wait()
    finally:
        collectives.dist.all_gather_object = real
    assert {group for main, group in used if not main} == {mesh.saving.group}
    assert mesh.saving.group not in {group for main, group in used if main}
    return sums


def test_the_saver_has_a_process_group_of_its_own(workers: Workers, tmp_path: Path) -> None:
    for sums in workers(2).run(groups_while_saving, str(tmp_path)):
        assert sums == [2.0 * step for step in range(1, 6) for _ in range(20)]
    assert sorted(e.name for e in tmp_path.iterdir()) == ["step-4", "step-5"]
