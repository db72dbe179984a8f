"""ZeRO 0 to 3 with every kind of offload against torch's own optimizers on one dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megads.config.schema import OptimConfig
from megads.kernels.reference import adamw
from megads.optim.update import make_update_rule
from megads.parallel.layout import ParallelLayout
from megads.zero.buckets import Entry, build_buckets
from megads.zero.memory import PAGE
from megads.zero.optimizer import ZeroOptimizer
from megads.zero.shards import Offload
from tests.distributed import Workers, mesh_for
from tests.training import assemble
from tests.zero.faults import spoil
from tests.zero.toy import (
    DECAYS,
    SAMPLES,
    SHAPES,
    STEPS,
    Toy,
    dense,
    samples,
    values,
    weights_in_use,
)

ADAM = OptimConfig(lr=0.05, weight_decay=0.3, clip=0.7)
SGD = OptimConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=0.5)
HEAVY_BALL = OptimConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, clip=0.5)


class Case(NamedTuple):
    """`shards`: ranks of a shard group, None for all; `accumulate`: microbatches of a step."""

    stage: int
    offload: str = "none"
    shards: int | None = None
    config: OptimConfig = ADAM
    accumulate: int = 2
    dtype: torch.dtype = torch.float32


def make(rank: int, world: int, case: Case, directory: Path) -> tuple[Toy, ZeroOptimizer]:
    """The toy, sharded, with its first weights."""
    shards = (case.shards or world) if case.stage else 1
    mesh = mesh_for(ParallelLayout(dp=world), rank, zero_shard_size=shards)
    model = Toy(dtype=case.dtype)
    buckets = build_buckets(
        [model], mesh, dtype=case.dtype, bucket_numel=150, sequence_parallel=False
    )
    assert len(buckets) > 3

    def initialize(entry: Entry) -> None:
        entry.param.data.copy_(values(entry.name))

    # Of each kind a page in each buffer: several pieces of a shard have to follow each other.
    offload = Offload(case.offload, directory, 1)  # type: ignore[arg-type]
    rule = make_update_rule(case.config, adamw)
    return model, ZeroOptimizer(
        [model],
        buckets,
        mesh,
        rule,
        case.config,
        stage=case.stage,
        initialize=initialize,
        offload=offload,
    )


def run(rank: int, world: int, case: Case, directory: Path, sabotage: str = "") -> dict[str, Any]:
    """Train; the weights in use afterwards, this rank's pieces of every kind, the norms."""
    undo = spoil(rank, sabotage) if sabotage else None
    model, optimizer = make(rank, world, case, directory)
    try:
        norms = [train_step(rank, world, case, model, optimizer, step) for step in range(STEPS)]
        assert all(p.grad is None for p in model.parameters())
        pieces = []
        for piece in optimizer.pieces(only_owned=True):
            with piece.opened() as data:
                pieces.append((piece.key, piece.global_shape, piece.offset, data.clone()))
        weights = weights_in_use(model)
        return {"weights": weights, "pieces": pieces, "norms": torch.tensor(norms)}
    finally:
        if undo is not None:
            undo()
        optimizer.close()


def train_step(
    rank: int, world: int, case: Case, model: Toy, optimizer: ZeroOptimizer, step: int
) -> float:
    size = SAMPLES // world // case.accumulate
    first = SAMPLES // world * rank
    optimizer.zero_grad()
    for m in range(case.accumulate):
        loss = model(samples(step, range(first + m * size, first + (m + 1) * size))) / SAMPLES
        optimizer.gradients.before_backward(0, is_last=m == case.accumulate - 1)
        loss.backward()
        optimizer.gradients.after_backward(0)
    optimizer.finish_gradients()
    norm = optimizer.grad_norm()
    clip = min(1.0, case.config.clip / (norm + 1e-6))
    optimizer.step(case.config.lr, grad_divisor=1 / clip)
    return norm


def check(per_rank: list[dict[str, Any]], case: Case) -> None:
    """Every element is on one rank, has the dense optimizer's value, and is what ranks compute
    with."""
    want = dense(case.config)
    whole = assemble([got["pieces"] for got in per_rank])
    kinds = make_update_rule(case.config, adamw).state_names
    assert whole.keys() == {f"{kind}/{name}" for kind in ("param", *kinds) for name in SHAPES}
    for name in SHAPES:
        torch.testing.assert_close(whole[f"param/{name}"], want[name], rtol=2e-5, atol=2e-6)
    for got in per_rank:
        torch.testing.assert_close(got["norms"], want["norms"], rtol=2e-5, atol=0)
        for name, weight in got["weights"].items():
            assert torch.equal(weight, whole[f"param/{name}"]), name
    assert torch.equal(whole["param/frozen"], values("frozen")), "a frozen parameter has moved"
    assert all(not whole[f"{kind}/frozen"].any() for kind in kinds)


OFFLOADS = ("none", "cpu", "nvme")
# All stages and offloads with two ranks; one microbatch or two, other rules, and other groups of
# four ranks for some.
CASES = [Case(stage, offload) for stage in range(4) for offload in OFFLOADS]
CASES += [Case(0, accumulate=1), Case(1, "cpu", accumulate=1), Case(2, accumulate=4)]
CASES += [Case(3, accumulate=1), Case(3, "nvme", accumulate=4)]
CASES += [Case(1, "nvme", config=SGD), Case(2, "cpu", config=SGD), Case(3, config=SGD)]
CASES += [Case(0, config=HEAVY_BALL), Case(2, config=HEAVY_BALL)]
CASES += [Case(3, "nvme", config=HEAVY_BALL)]
OF_FOUR = [Case(1), Case(2, "nvme"), Case(3, "cpu")]
HYBRID = [Case(stage, "none", 2) for stage in (1, 2, 3)]
HYBRID += [
    Case(1, "cpu", 2),
    Case(2, "nvme", 2),
    Case(3, "nvme", 2, accumulate=1),
    Case(3, "cpu", 1),
]


def name_of(case: Case) -> str:
    parts = [f"zero{case.stage}", case.offload, case.config.name, f"x{case.accumulate}"]
    return " ".join(parts if case.shards is None else [*parts, f"shards{case.shards}"])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_the_dense_optimizer(workers: Workers, tmp_path: Path, case: Case) -> None:
    check(workers(2).run(run, case, tmp_path), case)


@pytest.mark.parametrize("case", [*OF_FOUR, *HYBRID], ids=name_of)
def test_equals_the_dense_optimizer_on_four_ranks(
    workers: Workers, tmp_path: Path, case: Case
) -> None:
    check(workers(4).run(run, case, tmp_path), case)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offload_alone(tmp_path: Path, offload: str) -> None:
    """One process has nobody to share with, but a host and a disk."""
    for stage in (0, 2, 3):
        case = Case(stage, offload, accumulate=2)
        check([run(0, 1, case, tmp_path)], case)


def test_shards_are_streamed_in_several_pieces() -> None:
    """Else the cases above would not say much of streaming."""
    assert torch.Size(SHAPES["e"]).numel() // 4 > PAGE // 4


def test_the_dense_run_tells_the_cases_apart() -> None:
    """Clipping and weight decay matter, and some sample leaves "d" out."""
    want = dense(ADAM)
    assert all(norm > ADAM.clip for norm in want["norms"].tolist())
    for name in DECAYS:
        without = dense(ADAM.model_copy(update={"weight_decay": 0.0}))
        assert not torch.allclose(want[name], without[name], rtol=1e-3)
    taking_part = [
        [bool((samples(step, range(i, i + 1))[:, 0] > 0.7).any()) for i in range(SAMPLES)]
        for step in range(STEPS)
    ]
    assert any(any(part[:4]) != any(part[4:]) for part in taking_part)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_model_weights_are_the_rounded_masters(
    workers: Workers, tmp_path: Path, stage: int, offload: str
) -> None:
    case = Case(stage, offload, dtype=torch.bfloat16)
    per_rank = workers(2).run(run, case, tmp_path)
    whole = assemble([got["pieces"] for got in per_rank])
    for got in per_rank:
        for name, weight in got["weights"].items():
            assert torch.equal(weight, whole[f"param/{name}"].bfloat16()), name
    moved = [whole[f"param/{n}"] for n in ("e", "b", "a")]
    assert all(not torch.equal(m, m.bfloat16().float()) for m in moved), "masters have no more bits"


FAULTS = [
    ("no reduction", 2, Case(0)),
    ("no reduction", 2, Case(3)),
    ("last microbatch only", 2, Case(2)),
    ("last microbatch only", 2, Case(3, "nvme")),
    ("stale parameters", 2, Case(3)),
    ("no replica sum", 4, Case(1, shards=2)),
    ("no replica sum", 4, Case(3, shards=2)),
    ("own norm", 2, Case(1)),
]


@pytest.mark.parametrize("fault,world,case", FAULTS)
def test_negative_control(
    workers: Workers, tmp_path: Path, fault: str, world: int, case: Case
) -> None:
    got = workers(world).run(run, case, tmp_path, fault)
    with pytest.raises(AssertionError):
        check(got, case)
