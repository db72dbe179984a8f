"""When buckets are reduced, and with what in them.

One process; the collectives are replaced by a log that notes which bucket a reduction was started
for and what the bucket held at that moment. The oracle is a plain sum per parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megads.parallel import collectives
from megads.parallel.collectives import Handle
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis, Mesh
from megads.parallel.sharding import Init, ParamSpec, Part
from megads.zero.buckets import Bucket, bucket_kind, build_buckets
from megads.zero.grads import BucketSink, GradientBuckets

Way = Literal["add", "outer", "rows", "autograd"]
WAYS: tuple[Way, ...] = ("add", "outer", "rows", "autograd")
ROWS, COLUMNS = 3, 4
NAMES = tuple("abcdefgh")
MATRIX = ParamSpec("", (ROWS, COLUMNS), "matrix", Init())


class Log:
    """Stands in for the reductions over data-parallel ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, Tensor]] = []
        self.names: list[str] = []
        for name in ("all_reduce_async", "reduce_scatter_flat_async"):
            monkeypatch.setattr(collectives, name, self._replacement(name))

    def _replacement(self, name: str) -> Callable[..., Handle]:
        def start(flat: Tensor, axis: Axis) -> Handle:
            assert axis.name == "dp"
            self.started.append((flat.data_ptr(), flat.clone()))
            self.names.append(name)
            return Handle()

        return start

    def held(self, bucket: Bucket) -> list[Tensor]:
        """What `bucket` held at each start of its reduction."""
        return [held for pointer, held in self.started if pointer == bucket.grads.data_ptr()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


class Model:
    """Parameters in buckets, in the order in which their gradients come."""

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        *,
        mesh: Mesh | None = None,
        per_bucket: int = 100,
        sharded: bool = True,
        chunks: int = 1,
    ) -> None:
        mesh = mesh or Mesh.single()
        self.modules = [nn.Module() for _ in range(chunks)]
        for i, spec in enumerate(reversed(specs)):
            shape = spec.local_shape(mesh.tp.size)
            self.modules[i * chunks // len(specs)].register_parameter(
                spec.name, nn.Parameter(torch.empty(shape, device="meta"))
            )
        by_name = {spec.name: spec for spec in specs}
        self.buckets = build_buckets(
            self.modules,
            [by_name] * chunks,
            mesh,
            dtype=torch.float32,
            bucket_mb=per_bucket * 64 * 4 / 2**20,
            sequence_parallel=True,
        )
        self.sync = GradientBuckets(self.buckets, mesh, sharded=sharded)
        for bucket in self.buckets:
            bucket.grads.fill_(float("nan"))  # nobody may read what was there before
        self.sync.reset()

    def param(self, name: str) -> nn.Parameter:
        return next(p for m in self.modules for n, p in m.named_parameters() if n == name)

    def sink(self, name: str) -> BucketSink:
        return self.param(name).grad_sink  # type: ignore[return-value]

    def bucket(self, name: str) -> Bucket:
        return next(b for b in self.buckets if name in [e.spec.name for e in b.entries])

    def grad(self, name: str, of: Tensor | None = None) -> Tensor:
        """This parameter's part of its bucket, now or in a copy `of` it."""
        bucket = self.bucket(name)
        flat = bucket.grads if of is None else of
        for entry, place in bucket.placed():
            if entry.spec.name == name:
                return flat[place.start : place.stop].view(entry.param.shape).clone()
        raise KeyError(name)

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
            (self.param(name) * grad).sum().backward()
            assert self.param(name).grad is None
        else:
            which, values = torch.randint(rows, (5,), generator=source), ints(5, columns)
            sink.add_rows(which, values)
            grad = nn.functional.one_hot(which, rows).float().t() @ values
        return grad


def named(name: str, spec: ParamSpec = MATRIX, **changes: object) -> ParamSpec:
    return dataclasses.replace(spec, name=name, **changes)  # type: ignore[arg-type]


def check(model: Model, log: Log, expected: dict[str, Tensor]) -> None:
    """Each bucket was reduced once, when it held the complete sums, and still holds them."""
    for name, want in expected.items():
        (held,) = log.held(model.bucket(name))
        assert torch.equal(model.grad(name, held), want), f"{name} was reduced too early"
        assert torch.equal(model.grad(name), want), f"{name} has another sum"


STEP = st.lists(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(WAYS)), min_size=1)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=3),
    per_bucket=st.integers(1, 8),
    sharded=st.booleans(),
)
def test_sums_are_complete_whoever_contributes_when_and_how(
    steps: list[list[dict[str, Way]]], per_bucket: int, sharded: bool
) -> None:
    """Over several steps of several microbatches, of which each reaches some parameters only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = Log(monkeypatch)
        model = Model([named(n) for n in NAMES], per_bucket=per_bucket, sharded=sharded)
        for number, microbatches in enumerate(steps):
            log.started.clear()
            model.sync.reset()
            expected = {name: torch.zeros(ROWS, COLUMNS) for name in NAMES}
            for m, ways in enumerate(microbatches):
                is_last = m == len(microbatches) - 1
                model.sync.before_backward(0, m, is_last=is_last)
                for name in [n for n in NAMES if n in ways]:
                    seed = 1000 * number + 10 * m + NAMES.index(name)
                    expected[name] += model.contribute(name, ways[name], seed)
                early = {pointer for pointer, _ in log.started}
                for bucket in model.buckets:
                    is_complete = all(entry.spec.name in ways for entry in bucket.entries)
                    assert (bucket.grads.data_ptr() in early) == (is_last and is_complete)
            model.sync.finish()
            check(model, log, expected)
        wanted = "reduce_scatter_flat_async" if sharded else "all_reduce_async"
        assert set(log.names) == {wanted}


def test_a_bucket_starts_with_its_own_last_contribution(log: Log) -> None:
    """Not with the first, not at the end of the backward pass."""
    model = Model([named(n) for n in "abcd"], per_bucket=2)
    assert [[e.spec.name for e in b.entries] for b in model.buckets] == [["a", "b"], ["c", "d"]]
    model.sync.before_backward(0, 0, is_last=True)
    for count, name in zip((0, 1, 1, 2), "abcd", strict=True):
        model.contribute(name, "add", 0)
        assert len(log.started) == count
    model.sync.finish()
    assert len(log.started) == 2


def test_a_parameter_that_only_the_last_microbatch_leaves_out(log: Log) -> None:
    """Its bucket waits for `finish`, and what came before is kept."""
    model = Model([named("a"), named("b")])
    model.sync.before_backward(0, 0, is_last=False)
    a, b = model.contribute("a", "outer", 1), model.contribute("b", "add", 2)
    model.sync.before_backward(0, 1, is_last=True)
    a = a + model.contribute("a", "outer", 3)
    assert not log.started
    model.sync.finish()
    check(model, log, {"a": a, "b": b})


def test_nothing_contributed_at_all_gives_zeros(log: Log) -> None:
    model = Model([named("a"), named("b")], per_bucket=1)
    model.sync.before_backward(0, 0, is_last=True)
    model.sync.finish()
    check(model, log, {"a": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(ROWS, COLUMNS)})


def test_a_second_step_overwrites(log: Log) -> None:
    model = Model([named("a"), named("b")])
    for step in range(2):
        log.started.clear()
        model.sync.reset()
        model.sync.before_backward(0, 0, is_last=True)
        a = model.contribute("a", "rows", step)
        b = model.contribute("b", "outer", step) if step == 0 else torch.zeros(ROWS, COLUMNS)
        model.sync.finish()
        check(model, log, {"a": a, "b": b})


def test_negative_control_without_a_reset_the_step_before_is_noticed(log: Log) -> None:
    model = Model([named("a")])
    for step in range(2):
        log.started.clear()
        model.sync.before_backward(0, 0, is_last=True)
        a = model.contribute("a", "add", step)
        model.sync.finish()
        if step == 0:
            check(model, log, {"a": a})
    with pytest.raises((AssertionError, ValueError)):
        check(model, log, {"a": a})


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_used_twice_on_one_rank(log: Log, tied: bool) -> None:
    """The head gives its gradient first, the embedding last. A spec that is not marked as tied is
    the negative control: then the bucket is on its way before the embedding has contributed."""
    model = Model([named("word", tied=tied)])
    model.sync.before_backward(0, 0, is_last=False)
    total = model.contribute("word", "outer", 1) + model.contribute("word", "rows", 2)
    model.sync.before_backward(0, 1, is_last=True)
    total = total + model.contribute("word", "outer", 3)
    assert len(log.started) == (0 if tied else 1)
    total = total + model.contribute("word", "rows", 4)
    assert len(log.started) == 1
    model.sync.finish()
    if tied:
        check(model, log, {"word": total})
    else:
        with pytest.raises(AssertionError, match="word was reduced too early"):
            check(model, log, {"word": total})


def test_a_tied_weight_that_autograd_adds_up_itself(log: Log) -> None:
    """Then one contribution comes where two are expected: later, but complete."""
    model = Model([named("word", tied=True)])
    factors = torch.arange(12.0).view(ROWS, COLUMNS), torch.ones(ROWS, COLUMNS)
    model.sync.before_backward(0, 0, is_last=True)
    param = model.param("word")
    ((param * factors[0]).sum() + (param * factors[1]).sum()).backward()
    model.sync.finish()
    check(model, log, {"word": factors[0] + factors[1]})


def test_the_last_backward_of_one_chunk_says_nothing_of_another(log: Log) -> None:
    """Interleaved chunks end at different times."""
    model = Model([named(n) for n in "abcd"], chunks=2)
    late, early = model.bucket("a").plan.chunk, model.bucket("d").plan.chunk
    assert (early, late) == (0, 1)
    model.sync.before_backward(late, 0, is_last=True)
    first = [model.contribute(n, "add", i) for i, n in enumerate("ab")]
    model.sync.before_backward(early, 0, is_last=False)
    second = [model.contribute(n, "add", i) for i, n in enumerate("cd")]
    assert len(log.started) == 1
    model.sync.before_backward(early, 1, is_last=True)
    for i, name in enumerate("cd"):
        second[i] += model.contribute(name, "autograd", 10 + i)
    assert len(log.started) == 2
    model.sync.finish()
    check(model, log, dict(zip("abcd", first + second, strict=True)))


QKV = ParamSpec(
    "",
    ((4 + 1 + 1) * 2, COLUMNS),
    "matrix",
    Init(),
    tp_dim=0,
    parts=(Part("q", 4, 2), Part("k", 1, 2), Part("v", 1, 2)),
)
"""On two tensor-parallel ranks: two query heads each, and both the one KV head. 8 local rows."""


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


COPIES = [
    ("tp_partial", named("x", tp_gradient="partial"), "tp", "tp", slice(0, ROWS)),
    (
        "tp_partial",
        named("x", tp_gradient="partial_if_sequence_parallel"),
        "tp",
        "tp",
        slice(0, ROWS),
    ),
    ("kv_copies", named("x", QKV), "tp", "kv", slice(4, 8)),
    ("tied", named("x", tied=True), "pp", "tied", slice(0, ROWS)),
]
"""Kind of bucket, what is in it, the axis of size 2, the axis summed over, the rows summed."""
PLAIN = [("plain", named("x"), axis, None, slice(0, 0)) for axis in ("tp", "pp")]


def sum_with_a_peer(
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, ParamSpec, str, str | None, slice],
    *,
    contributes: bool,
) -> None:
    """One step in which the made-up peer holds ones and this rank what it contributes, if it does;
    checks the result."""
    kind, spec, axis_name, over, summed = case
    mesh, seen = of_two(axis_name), []

    def add_ones(tensor: Tensor, axis: Axis) -> Tensor:
        assert not log.started, "the sum over copies comes first"
        seen.append(axis.name)
        return tensor.add_(1.0)

    monkeypatch.setattr(collectives, "all_reduce", add_ones)
    assert bucket_kind(spec, mesh, sequence_parallel=True) == kind
    model = Model([spec], mesh=mesh)
    model.sync.before_backward(0, 0, is_last=True)
    want = torch.zeros(model.param("x").shape)
    if contributes:
        want += model.contribute("x", "outer", 5)
    assert bool(log.started) == (kind == "plain" and contributes)
    model.sync.finish()
    want[summed] += 1.0
    check(model, log, {"x": want})
    assert seen == ([over] if over else [])


@pytest.mark.parametrize("case", [*COPIES, *PLAIN])
def test_copies_are_summed_before_the_reduction(
    log: Log, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ParamSpec, str, str | None, slice]
) -> None:
    sum_with_a_peer(log, monkeypatch, case, contributes=True)


@pytest.mark.parametrize("case", COPIES)
def test_a_rank_without_a_contribution_takes_that_of_its_peer(
    log: Log, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ParamSpec, str, str | None, slice]
) -> None:
    sum_with_a_peer(log, monkeypatch, case, contributes=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_added_up_in_fp32(log: Log, dtype: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bf16, 2048 + 1 + 1 is 2048 in fp16."""
    model = Model([named("a")])
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    assert torch.tensor(large, dtype=dtype) + 1 == large
    model.sync.before_backward(0, 0, is_last=False)
    for value in (large, 1.0, 1.0):
        model.sink("a").add(torch.full((ROWS, COLUMNS), value, dtype=dtype))
    model.sync.finish()
    assert torch.equal(model.grad("a"), torch.full((ROWS, COLUMNS), large + 2))
