"""The pipeline against a dense model in one process: losses and gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megads.parallel.batch import MicroBatch
from megads.parallel.gradsync import NoSync
from megads.pipeline.partition import StagePlan
from megads.pipeline.schedule import build_schedule, send_window
from megads.pipeline.simulate import simulate
from tests.distributed import Workers
from tests.pipeline.toy import (
    Whole,
    executor_for,
    make_batches,
    mesh_of,
    named_grads,
    plan_for,
)

SCALE = 0.25


class Recorder(NoSync):
    """A GradSync that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.running: list[int] = []

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        assert not self.running, "one backward at a time"
        self.running.append(chunk)
        self.calls.append((chunk, is_last))

    def after_backward(self, chunk: int) -> None:
        assert self.running.pop() == chunk


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
        "running": recorder.running,
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
    assert len(result["calls"]) == len(pairs) and result["running"] == []
    for chunk in range(chunks):
        last = [is_last for c, is_last in result["calls"] if c == chunk]
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
