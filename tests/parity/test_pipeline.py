"""The pipeline against a dense model in one process: losses, gradients, memory, failures."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megads.config.schema import ModelConfig
from megads.errors import ConfigError
from megads.parallel.batch import MicroBatch
from megads.parallel.gradsync import NoSync
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from megads.pipeline.executor import PipelineExecutor
from megads.pipeline.partition import StagePlan, plan_stages
from megads.pipeline.schedule import build_schedule, send_window
from megads.pipeline.simulate import simulate
from tests.distributed import RemoteFailure, Workers, mesh_for
from tests.pipeline.toy import (
    HIDDEN,
    VOCAB,
    Piece,
    Whole,
    activation_shape,
    make_batches,
    named_grads,
)

SCALE = 0.25


def plan_for(layers: int, pp: int, chunks: int, split: Sequence[int] | None = None) -> StagePlan:
    config = ModelConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=2, vocab_size=VOCAB
    )
    return plan_stages(config, pp, chunks, 7, split)


class Recorder(NoSync):
    """A GradSync that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def before_backward(self, chunk: int, microbatch: int, *, is_last: bool) -> None:
        self.calls.append((chunk, microbatch, is_last))


def executor_for(
    whole: Whole, plan: StagePlan, schedule: str, mesh: Mesh, **more: Callable[..., None]
) -> PipelineExecutor:
    pieces = [Piece(whole, chunk) for chunk in plan.chunks_of(mesh.pp.index)]
    return PipelineExecutor(
        pieces,
        plan,
        schedule,
        mesh,
        activation_shape=activation_shape,
        dtype=torch.float32,
        **more,
    )


def mesh_of(rank: int, pp: int) -> Mesh:
    return Mesh.single() if pp == 1 else mesh_for(ParallelLayout(pp=pp), rank)


def hide_tokens(batches: Sequence[MicroBatch], plan: StagePlan, stage: int) -> list[MicroBatch]:
    """What a stage between the ends may rely on: the size of the microbatch."""
    if any(c.has_embedding or c.has_head for c in plan.chunks_of(stage)):
        return list(batches)
    meta = [torch.empty(b.tokens.shape, dtype=torch.int64, device="meta") for b in batches]
    return [MicroBatch(t, t, None, b.index) for t, b in zip(meta, batches, strict=True)]


def run_stage(
    rank: int, pp: int, case: tuple[str, int, int, Sequence[int] | None], sizes: Sequence[int]
) -> dict[str, object]:
    """Train on one step and evaluate on the same microbatches; what this stage saw."""
    schedule, layers, chunks, split = case
    plan, mesh, whole = plan_for(layers, pp, chunks, split), mesh_of(rank, pp), Whole(layers)
    batches = hide_tokens(make_batches(sizes), plan, rank)
    seeded: list[tuple[int, int]] = []
    executor = executor_for(
        whole, plan, schedule, mesh, before_forward=lambda c, b: seeded.append((c, b.index))
    )
    recorder = Recorder()
    loss = executor.run(batches, recorder, grad_scale=SCALE)
    grads = named_grads(whole)
    assert not loss.requires_grad and loss.dtype == torch.float32
    return {
        "loss": loss.item(),
        "grads": grads,
        "eval": executor.evaluate(batches).item(),
        "untouched": all(torch.equal(g, grads[n]) for n, g in named_grads(whole).items()),
        "calls": recorder.calls,
        "seeded": seeded[: chunks * len(sizes)],
        "peak": executor.peak_in_flight,
    }


def dense(layers: int, sizes: Sequence[int], *, scale: float = SCALE) -> tuple[float, dict]:
    whole = Whole(layers)
    loss = sum(whole(batch) for batch in make_batches(sizes))
    assert isinstance(loss, Tensor)
    (loss * scale).backward()
    return loss.item(), named_grads(whole)


def differences(results: list[dict], layers: int, sizes: Sequence[int]) -> list[str]:
    """Everything in which the stages' results differ from the dense model's."""
    loss, grads = dense(layers, sizes)
    found = []
    close = {"rtol": 2e-5, "atol": 2e-6}
    for kind in ("loss", "eval"):
        got = [r[kind] for r in results]
        if any(got[:-1]) or got[-1] != pytest.approx(loss, rel=1e-5):
            found.append(f"{kind} {got} for {loss}")
    owned = [name for r in results for name in r["grads"]]
    if sorted(owned) != sorted(grads):
        found.append(f"gradients of {owned}")
    for name, grad in (item for r in results for item in r["grads"].items()):
        if not torch.allclose(grad, grads[name], **close):
            found.append(f"gradient of {name}")
    return found


def run_all(
    workers: Workers, pp: int, case: tuple[str, int, int, Sequence[int] | None], sizes: list[int]
) -> list[dict]:
    return [run_stage(0, 1, case, sizes)] if pp == 1 else workers(pp).run(run_stage, case, sizes)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_losses_and_gradients_equal_the_dense_model(
    workers: Workers, pp: int, schedule: str, chunks: int
) -> None:
    draw = random.Random(pp * 10 + chunks)
    for m in (1, 2, 3, 4, 5, 2 * pp, 2 * pp + 1):
        layers = pp * chunks + draw.randint(0, 3)
        sizes = [draw.randint(1, 3) for _ in range(m)]
        results = run_all(workers, pp, (schedule, layers, chunks, None), sizes)
        assert differences(results, layers, sizes) == [], (m, layers, sizes)
        window = send_window(pp, m)
        report = simulate(build_schedule(schedule, pp, chunks, m), chunks, m, send_window=window)
        assert tuple(r["peak"] for r in results) == report.peak_in_flight
        for stage, result in enumerate(results):
            if schedule == "1f1b":
                assert result["peak"] == min(m, pp - stage)
            check_hooks(result, chunks, m)


def check_hooks(result: dict, chunks: int, m: int) -> None:
    pairs = [(c, mb) for c in range(chunks) for mb in range(m)]
    assert sorted(result["seeded"]) == pairs
    assert sorted(call[:2] for call in result["calls"]) == pairs
    for chunk in range(chunks):
        last = [is_last for c, _, is_last in result["calls"] if c == chunk]
        assert last == [False] * (m - 1) + [True]
    assert result["untouched"], "evaluation changed gradients"


def test_uneven_and_empty_end_stages(workers: Workers) -> None:
    for pp, chunks, split in ((2, 1, (5, 0)), (2, 2, (0, 3, 1, 1)), (3, 1, (0, 4, 1))):
        results = run_all(workers, pp, ("auto", 5, chunks, split), [2, 1, 2])
        assert differences(results, 5, [2, 1, 2]) == []


def test_the_comparison_notices_a_lost_microbatch_and_a_wrong_scale(workers: Workers) -> None:
    results = run_all(workers, 2, ("1f1b", 4, 1, None), [2, 2, 1])
    assert differences(results, 4, [2, 2, 1]) == []
    assert len(differences(results, 4, [2, 2])) > 3
    for result in results:
        for grad in result["grads"].values():
            grad *= 3
    assert any("gradient" in d for d in differences(results, 4, [2, 2, 1]))


@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_do_not_depend_on_the_microbatch_size(workers: Workers, pp: int) -> None:
    found = []
    for count in (1, 2, 4, 8):
        results = (
            workers(pp).run(regrouped_grads, count) if pp > 1 else [regrouped_grads(0, 1, count)]
        )
        found.append({k: v for grads in results for k, v in grads.items()})
    whole = Whole(4)
    (sum(whole(b) for b in make_batches([8])) / (8 * 7)).backward()
    for grads in found:
        for name, expected in named_grads(whole).items():
            torch.testing.assert_close(grads[name], expected, rtol=1e-5, atol=1e-6)


def regrouped_grads(rank: int, pp: int, count: int) -> dict[str, Tensor]:
    """The same 8 samples as `count` microbatches; the gradient of the mean loss."""
    (batch,) = make_batches([8])
    parts = zip(batch.tokens.chunk(count), batch.labels.chunk(count), strict=True)
    whole = Whole(4)
    executor = executor_for(whole, plan_for(4, pp, 1), "1f1b", mesh_of(rank, pp))
    executor.run([MicroBatch(t, y) for t, y in parts], NoSync(), grad_scale=1 / (8 * 7))
    return named_grads(whole)


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
        counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()) - len(kept))
    return counts


@pytest.mark.parametrize("m", [2, 9])
def test_no_graph_or_output_outlives_a_step(workers: Workers, m: int) -> None:
    for counts in workers(2).run(count_tensors, "1f1b", m, 12):
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


def forward_only(rank: int, pp: int, sizes: list[int]) -> tuple[float, bool]:
    plan, whole = plan_for(6, pp, 2), Whole(6)
    executor = executor_for(whole, plan, "interleaved", mesh_of(rank, pp))
    loss = executor.evaluate(make_batches(sizes))
    return loss.item(), loss.requires_grad or bool(named_grads(whole))


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_evaluation_takes_any_number_and_a_smaller_last_microbatch(
    workers: Workers, pp: int
) -> None:
    for sizes in ([3], [3, 1], [2, 2, 2, 2, 1], [2] * 11):
        results = workers(pp).run(forward_only, sizes) if pp > 1 else [forward_only(0, 1, sizes)]
        loss, _ = dense(6, sizes)
        assert results[-1] == (pytest.approx(loss, rel=1e-5), False)
        assert all(result == (0.0, False) for result in results[:-1])


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
    with pytest.raises(ConfigError, match="use parallel.schedule=interleaved"):
        executor_for(Whole(4), plan_for(4, 1, 2), "1f1b", Mesh.single())
    with pytest.raises(ValueError, match="the mesh 1 stages"):
        executor_for(Whole(4), plan_for(4, 2, 1), "1f1b", Mesh.single())
