"""Gradients of parameters that several ranks hold: everybody's contributions, once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megads.parallel import collectives
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis, Mesh
from megads.parallel.sharding import Init, ParamSpec, Part
from megads.zero.buckets import Bucket, copies_of
from megads.zero.grads import BucketReducer
from tests.zero.reducing import (
    COLUMNS,
    ROWS,
    STAGE0,
    Log,
    Mode,
    Model,
    every_mode,
    named,
)

QKV = ParamSpec(
    "",
    ((4 + 1 + 1) * 2, COLUMNS),
    "matrix",
    Init(),
    tp_dim=0,
    parts=(Part("q", 4, 2), Part("k", 1, 2), Part("v", 1, 2)),
)
"""On two tensor-parallel ranks: two query heads each, and both the one KV head. 8 local rows."""
LONG = ParamSpec("", (70, COLUMNS), "norm", Init())
"""Long enough that it lies in the shards of several ranks."""


def of_two(axis: str) -> Mesh:
    """The first of two ranks along `axis`, one of which is this process and one made up."""
    two = Axis(axis, 2, 0, (0, 1))
    if axis == "tp":
        layout = ParallelLayout(tp=2)
        return dataclasses.replace(
            Mesh.single(), layout=layout, tp=two, kv=dataclasses.replace(two, name="kv")
        )
    tied = dataclasses.replace(two, name="tied")
    return dataclasses.replace(Mesh.single(), layout=ParallelLayout(pp=2), pp=two, tied=tied)


PARTIAL_IF_SP = "partial_if_sequence_parallel"
COPIES = [
    ("tp_partial", named("x", tp_gradient="partial"), "tp", "tp", slice(0, ROWS)),
    ("tp_partial", named("x", LONG, tp_gradient="partial"), "tp", "tp", slice(0, 70)),
    ("tp_partial", named("x", tp_gradient=PARTIAL_IF_SP), "tp", "tp", slice(0, ROWS)),
    ("kv", named("x", QKV), "tp", "kv", slice(4, 8)),
    ("tied", named("x", tied=True), "pp", "tied", slice(0, ROWS)),
    ("tied", named("x", LONG, tied=True), "pp", "tied", slice(0, 70)),
]
"""Kind of copies, a parameter that has them, the axis of size 2, the axis summed over, the rows
summed."""
PLAIN = [("none", named("x"), axis, None, slice(0, 0)) for axis in ("tp", "pp")]
Case = tuple[str, ParamSpec, str, str | None, slice]


def sum_with_a_peer(
    log: Log, monkeypatch: pytest.MonkeyPatch, case: Case, mode: Mode, *, contributes: bool
) -> None:
    """A step of two microbatches in which the made-up peer's sum over data-parallel ranks is all
    ones and this rank contributes, or not, to "x" between two other parameters; checks the sum."""
    kind, spec, axis_name, over, summed = case
    mesh, seen = of_two(axis_name), []
    specs = [named("a"), spec, named("b")]
    model = Model(log, specs, mesh=mesh, mode=mode)

    def add_ones(tensor: Tensor, axis: Axis) -> Tensor:
        if axis.size > 1:
            assert len(log.started) == len(model.buckets) * (1 if mode.keeps else 2)
            seen.append(axis.name)
            tensor.add_(1.0)
        return tensor

    monkeypatch.setattr(collectives, "all_reduce", add_ones)
    assert copies_of(spec, model.mesh, sequence_parallel=True) == kind
    want = torch.zeros(model.param("x").shape)
    for m in range(2):
        model.sync.before_backward(0, is_last=m == 1)
        for name in "bxa":
            model.begin(f"unit {name}")
            if contributes or name != "x":
                given = model.contribute(name, "outer", m)
                want += given if name == "x" else 0
        model.sync.after_backward(0)
    model.sync.finish()
    want *= 2  # the data-parallel peer's
    want[summed] += 1.0  # the other holder's: it has been summed over data-parallel ranks
    got, elements = model.reduced("x")
    assert torch.equal(got, want.view(-1)[elements])
    others = [e.spec.name for b in model.buckets for e in b.entries if e.spec.name != "x"]
    assert sorted(others) == ["a", "b"] and not any(model.reduced(n)[0].isnan().any() for n in "ab")
    is_mine = any(bucket_has_copies(model, b, kind) for b in model.buckets)
    assert seen == ([over] if over and is_mine else [])


def bucket_has_copies(model: Model, bucket: Bucket, kind: str) -> bool:
    """Whether any element of this rank's shard has copies; some shards are padding."""
    first, last = bucket.plan.part(model.mesh.shard.size, model.mesh.shard.index)
    return any(
        entry.copies == kind and max(first, place.start + 4 * COLUMNS * (kind == "kv"))
        < min(last, place.stop)
        for entry, place in bucket.placed()
    )  # fmt: skip


@pytest.mark.parametrize("case", [*COPIES, *PLAIN], ids=lambda case: case[0])
@every_mode
def test_copies_are_summed_once_after_the_reductions(
    log: Log, monkeypatch: pytest.MonkeyPatch, case: Case, mode: Mode
) -> None:
    sum_with_a_peer(log, monkeypatch, case, mode, contributes=True)


@pytest.mark.parametrize("case", COPIES, ids=lambda case: case[0])
@every_mode
def test_a_rank_without_a_contribution_takes_that_of_its_peer(
    log: Log, monkeypatch: pytest.MonkeyPatch, case: Case, mode: Mode
) -> None:
    sum_with_a_peer(log, monkeypatch, case, mode, contributes=False)


def test_negative_control_copies_that_are_not_summed(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BucketReducer, "copies", lambda self, kind: iter(()))
    with pytest.raises(AssertionError):
        sum_with_a_peer(log, monkeypatch, COPIES[0], STAGE0, contributes=True)
