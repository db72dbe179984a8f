"""The executor's memory, and what it does with faults; its numbers are in `tests/parity`."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megads.errors import ConfigError
from megads.parallel.batch import MicroBatch
from megads.parallel.gradsync import NoSync
from megads.parallel.mesh import Mesh
from megads.pipeline.schedule import send_window
from tests.distributed import RemoteFailure, Workers
from tests.pipeline.toy import Piece, Whole, executor_for, make_batches, mesh_of, plan_for


class Overflowing(torch.nn.Module):
    """A piece whose result is infinite every third time it is called."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece, self.calls = piece, 0

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        self.calls += 1
        return self.piece(hidden, batch) * (float("inf") if self.calls % 3 == 0 else 1.0)


def count_tensors(rank: int, pp: int, schedule: str, m: int, steps: int) -> list[int]:
    """Live tensors after each step, with every step's loss kept, as a logger would."""
    mesh, whole = mesh_of(rank, pp), Whole(4)
    plan = plan_for(4, pp, 1)
    executor = executor_for(whole, plan, schedule, mesh)
    executor.modules = [Overflowing(Piece(whole, c)) for c in plan.chunks_of(rank)]
    kept, counts = [], []
    batches = make_batches([2] * m)
    for _ in range(steps):
        kept.append(executor.run(batches, NoSync(), grad_scale=1.0))
        gc.collect()
        # By type: asking a lazily imported module for its class would import it.
        counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()) - len(kept))
    return counts


@pytest.mark.parametrize("m", [2, 9])
def test_no_graph_or_output_outlives_a_step(workers: Workers, m: int) -> None:
    for counts in workers(2).run(count_tensors, "1f1b", m, 7):
        assert len(set(counts[2:])) == 1, counts


class Saved:
    """Bytes that autograd keeps for backward passes, as a saved-tensor hook sees them."""

    def __init__(self) -> None:
        self.peak = self.live = 0

    def pack(self, tensor: Tensor) -> Holder:
        return Holder(self, tensor)


class Holder:
    def __init__(self, owner: Saved, tensor: Tensor) -> None:
        self.owner, self.tensor, self.bytes = owner, tensor, tensor.nbytes
        owner.live += self.bytes
        owner.peak = max(owner.peak, owner.live)

    def __del__(self) -> None:
        self.owner.live -= self.bytes


def saved_bytes(rank: int, pp: int, schedule: str, m: int) -> tuple[int, int]:
    """(peak, left over) bytes saved for backward during one step."""
    whole, saved = Whole(4), Saved()
    executor = executor_for(whole, plan_for(4, pp, 1), schedule, mesh_of(rank, pp))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.tensor):
        executor.run(make_batches([2] * m), NoSync(), grad_scale=1.0)
    return saved.peak, saved.live


def test_activation_memory_follows_the_schedule_and_not_the_microbatches(
    workers: Workers,
) -> None:
    few, many = (workers(2).run(saved_bytes, "1f1b", m) for m in (4, 12))
    assert few == many
    assert all(left == 0 for _, left in many)
    gpipe = workers(2).run(saved_bytes, "gpipe", 12)
    assert all(
        all_at_once > 5 * peak for (all_at_once, _), (peak, _) in zip(gpipe, many, strict=False)
    )


def outputs_alive(rank: int, pp: int) -> list[int]:
    """How many of the stage's earlier outputs still have their memory, at each forward pass."""
    executor = executor_for(Whole(4), plan_for(4, pp, 1), "gpipe", mesh_of(rank, pp))
    piece, made, counts = executor.modules[0], [], []

    def traced(hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        counts.append(sum(not storage.expired() for storage in made))
        output = piece(hidden, batch)
        made.append(StorageWeakRef(output.untyped_storage()))
        return output

    executor.modules = [traced]
    executor.run(make_batches([2] * 12), NoSync(), grad_scale=1.0)
    assert executor.peak_in_flight == 12
    return counts


def test_outputs_are_freed_once_sent_although_their_graphs_wait(workers: Workers) -> None:
    first, _ = workers(2).run(outputs_alive)
    assert max(first) <= send_window(2, 12)


def failing_stage(rank: int, pp: int) -> None:
    executor = executor_for(Whole(4), plan_for(4, pp, 1), "1f1b", mesh_of(rank, pp))
    if rank == 1:

        def explode(hidden: Tensor | None, batch: MicroBatch) -> Tensor:
            raise RuntimeError(f"no forward for microbatch {batch.index}")

        executor.modules = [explode]
    executor.run(make_batches([1] * 3), NoSync(), grad_scale=1.0)


def test_an_exception_in_a_stage_surfaces(workers: Workers) -> None:
    with pytest.raises(RemoteFailure, match="no forward for microbatch 0"):
        workers(2).run(failing_stage, timeout=20)


def test_a_wrong_shape_is_named_where_it_is_made() -> None:
    plan = plan_for(4, 1, 2)
    executor = executor_for(Whole(4), plan, "auto", Mesh.single())
    executor.activation_shape = lambda batch: (1, 2, 3)
    with pytest.raises(
        ValueError, match=r"chunk 0 of stage 0 returned .*\(7, 2, 12\).*\(1, 2, 3\)"
    ):
        executor.run(make_batches([2]), NoSync(), grad_scale=1.0)


def test_what_cannot_run_is_refused_when_built() -> None:
    with pytest.raises(ConfigError, match="choices: auto, gpipe, 1f1b, interleaved"):
        executor_for(Whole(4), plan_for(4, 1, 1), "zigzag", Mesh.single())
    with pytest.raises(ConfigError, match=r"use parallel\.schedule=interleaved"):
        executor_for(Whole(4), plan_for(4, 1, 2), "1f1b", Mesh.single())
    with pytest.raises(ValueError, match="the mesh 1 stages"):
        executor_for(Whole(4), plan_for(4, 2, 1), "1f1b", Mesh.single())
