"""When buckets are reduced, and with what in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megads.parallel.mesh import Mesh
from megads.zero.buckets import build_buckets
from megads.zero.grads import BucketReducer, GradientBuckets
from tests.zero.reducing import (
    COLUMNS,
    MODES,
    NAMES,
    ROWS,
    STAGE2,
    WAYS,
    Log,
    Mode,
    Model,
    Way,
    check,
    every_mode,
    named,
    zeros,
)

STEP = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(WAYS)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=3),
    per_bucket=st.integers(1, 8),
    mode=st.sampled_from(list(MODES.values())),
)
def test_sums_are_complete_whoever_contributes_when_and_how(
    steps: list[list[dict[str, Way]]], per_bucket: int, mode: Mode
) -> None:
    """Over several steps of several microbatches, of which each reaches some parameters only."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = Log(monkeypatch)
        model = Model(log, [named(n) for n in NAMES], per_bucket=per_bucket, mode=mode)
        for number, microbatches in enumerate(steps):
            log.started.clear()
            model.sync.reset()
            given = []
            for m, ways in enumerate(microbatches):
                is_last = m == len(microbatches) - 1
                seed = 1000 * number + 10 * m
                given.append(zeros() | model.backward(ways, seed, is_last=is_last))
                assert bool(log.started) == (is_last or not mode.keeps)
                assert mode.keeps or not any(b.grads.nbytes for b in model.buckets)
            model.sync.finish()
            check(model, given)
        alone = mode.shards == 1
        call = ("all_reduce_async", "replica") if alone else ("reduce_scatter_flat_async", "shard")
        assert log.calls == {call}


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.lists(st.tuples(STEP, STEP), min_size=2, max_size=2),
    per_bucket=st.integers(1, 8),
    mode=st.sampled_from(list(MODES.values())),
)
def test_reductions_begin_in_one_order_whichever_parameters_take_part(
    ranks: list[tuple[list[dict[str, Way]], list[dict[str, Way]]]], per_bucket: int, mode: Mode
) -> None:
    """Two ranks, of which each reaches other parameters in each microbatch."""
    microbatches = min(len(chunk) for rank in ranks for chunk in rank)
    orders = []
    for rank in ranks:
        with pytest.MonkeyPatch.context() as monkeypatch:
            model = Model(
                Log(monkeypatch),
                [named(n) for n in NAMES],
                per_bucket=per_bucket,
                mode=mode,
                chunks=2,
            )
            for m in range(microbatches):
                for chunk in (1, 0):
                    ways = {n: w for n, w in rank[chunk][m].items() if NAMES.index(n) // 4 != chunk}
                    model.backward(ways, 10 * m, is_last=m == microbatches - 1, chunk=chunk)
            model.sync.finish()
            orders.append(model.log.events)
    assert orders[0] == orders[1]
    starts = [event for event in orders[0] if isinstance(event, int)]
    once = list(range(len(model.buckets)))
    assert starts == once * (1 if mode.keeps else microbatches)


@every_mode
def test_a_bucket_starts_when_the_unit_after_its_last_one_begins(log: Log, mode: Mode) -> None:
    """Not with its first or last contribution, nor at the end of the backward pass."""
    model = Model(log, [named(n) for n in "abcde"], per_bucket=2, mode=mode)
    assert [[e.spec.name for e in b.entries] for b in model.buckets] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    model.sync.before_backward(0, is_last=True)
    for count, name in zip((0, 0, 1, 1, 2), "abcde", strict=True):
        model.begin(f"unit {name}")
        assert len(log.started) == count
        model.contribute(name, "add", 0)
        assert len(log.started) == count
    model.sync.after_backward(0)
    assert len(log.started) == 3
    model.sync.finish()
    assert len(log.started) == 3


def test_a_bucket_is_released_before_the_one_after_the_next_is_filled(log: Log) -> None:
    """What is being reduced and what is being filled is all that stage 2 has at once."""
    model = Model(log, [named(n) for n in NAMES], per_bucket=1, mode=STAGE2)
    for _ in range(2):
        model.sync.before_backward(0, is_last=False)
        for number, name in enumerate(NAMES):
            model.begin(f"unit {name}")
            model.contribute(name, "outer", number)
            held = [b.plan.units for b in model.buckets if b.grads.nbytes]
            assert held == [(f"unit {n}",) for n in NAMES[max(number - 1, 0) : number + 1]]
        model.sync.after_backward(0)
        assert not any(b.grads.nbytes for b in model.buckets)


@every_mode
def test_units_that_are_not_announced_are_reduced_at_the_end(log: Log, mode: Mode) -> None:
    model = Model(log, [named(n) for n in "ab"], per_bucket=1, mode=mode)
    model.sync.before_backward(0, is_last=True)
    given = {name: model.contribute(name, "add", 3) for name in "ba"}
    model.sync.after_backward(0)
    assert [number for number, _ in log.started] == [0, 1]
    model.sync.finish()
    check(model, [given])


@every_mode
def test_a_parameter_that_only_the_last_microbatch_leaves_out(log: Log, mode: Mode) -> None:
    """What came before is kept."""
    model = Model(log, [named("a"), named("b")], mode=mode)
    first = model.backward({"a": "outer", "b": "add"}, 1, is_last=False)
    second = model.backward({"a": "outer"}, 3, is_last=True)
    model.sync.finish()
    check(model, [first, zeros("ab") | second])


@every_mode
def test_nothing_contributed_at_all_gives_zeros(log: Log, mode: Mode) -> None:
    model = Model(log, [named("a"), named("b")], per_bucket=1, mode=mode)
    model.backward({}, 0, is_last=True)
    model.sync.finish()
    check(model, [zeros("ab")])


@every_mode
def test_a_second_step_overwrites(log: Log, mode: Mode) -> None:
    model = Model(log, [named("a"), named("b")], mode=mode)
    steps: tuple[dict[str, Way], ...] = ({"a": "rows", "b": "outer"}, {"a": "rows"})
    for seed, ways in enumerate(steps):
        log.started.clear()
        model.sync.reset()
        given = model.backward(ways, seed, is_last=True)
        model.sync.finish()
        check(model, [zeros("ab") | given])


@every_mode
def test_negative_control_without_a_reset_the_step_before_is_noticed(log: Log, mode: Mode) -> None:
    """On this rank's share; with four ranks it would be padding."""
    if mode.shards > 1:
        mode = mode._replace(shards=1)
    model = Model(log, [named("a")], mode=mode)
    for step in range(2):
        log.started.clear()
        given = model.backward({"a": "add"}, step, is_last=True)
        model.sync.finish()
        if step == 0:
            check(model, [given])
    with pytest.raises(AssertionError):
        check(model, [given])


@pytest.mark.parametrize("reads", [True, False])
@every_mode
def test_a_tied_weight_used_twice_on_one_rank(log: Log, mode: Mode, reads: bool) -> None:
    """The head gives its gradient first, the embedding last. An embedding that is not said to read
    it is the negative control: then it is on its way before the embedding has contributed."""
    units = {"embedding": ("a",) if reads else (), "block": ("b",), "head": ("a",)}
    model = Model(
        log, [named("b"), named("a", tied=True)] if reads else [named("a"), named("b")],
        units=units, mode=mode, per_bucket=1,
    )  # fmt: skip
    microbatches = []
    for m in range(2):
        model.sync.before_backward(0, is_last=m == 1)
        model.begin("head")
        a = model.contribute("a", "outer", 10 * m + 1)
        model.begin("block")
        b = model.contribute("b", "add", 10 * m + 2)
        model.begin("embedding")
        assert not reads or bool(log.started) == (m == 1 or not mode.keeps)
        a = a + model.contribute("a", "rows", 10 * m + 3)
        model.sync.after_backward(0)
        microbatches.append({"a": a, "b": b})
    if reads:
        model.sync.finish()
        check(model, microbatches)
    else:
        with pytest.raises(AssertionError, match="a was reduced too early"):
            check(model, microbatches)


def test_a_tied_weight_that_autograd_adds_up_itself(log: Log) -> None:
    model = Model(log, [named("word", tied=True)])
    factors = torch.arange(12.0).view(ROWS, COLUMNS), torch.ones(ROWS, COLUMNS)
    model.sync.before_backward(0, is_last=True)
    model.bucket("word").params.acquire()
    param = model.param("word")
    ((param * factors[0]).sum() + (param * factors[1]).sum()).backward()
    model.sync.after_backward(0)
    model.sync.finish()
    check(model, [{"word": factors[0] + factors[1]}])


@every_mode
def test_the_last_backward_of_one_chunk_says_nothing_of_another(log: Log, mode: Mode) -> None:
    """Interleaved chunks end at different times."""
    model = Model(log, [named(n) for n in "abcd"], chunks=2, mode=mode)
    late, early = model.bucket("a").plan.chunk, model.bucket("d").plan.chunk
    assert (early, late) == (0, 1)
    ways: dict[str, Way] = {"a": "add", "b": "outer"}
    first = [model.backward(ways, m, is_last=m == 1, chunk=late) for m in range(2)]
    assert len(log.started) == (1 if mode.keeps else 2)
    ways = {"c": "autograd", "d": "rows"}
    second = [model.backward(ways, m, is_last=False, chunk=early) for m in range(1)]
    assert len(log.started) == (1 if mode.keeps else 3)
    second.append(model.backward(ways, 5, is_last=True, chunk=early))
    model.sync.finish()
    check(model, [a | b for a, b in zip(first, second, strict=True)])


def test_a_frozen_parameter_has_no_gradient(log: Log) -> None:
    """And takes part in no backward pass; its bucket is reduced all the same."""
    module = nn.Module()
    module.specs = {n: named(n) for n in "ab"}  # type: ignore[assignment]
    module.units = {"unit": ("a", "b")}  # type: ignore[assignment]
    for name in "ab":
        module.register_parameter(
            name, nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta"), requires_grad=name == "a")
        )
    mesh = Mesh.single()
    (bucket,) = log.buckets = build_buckets(
        [module], mesh, dtype=torch.float32, bucket_numel=1000, sequence_parallel=False
    )
    params = dict(module.named_parameters())
    assert params["a"].requires_grad and not params["b"].requires_grad
    bucket.params.acquire()
    bucket.grads.acquire()
    reducer = BucketReducer(bucket, mesh, bucket.grads.tensor, moves=False, keeps=True)
    sync = GradientBuckets([reducer], mesh, every_backward=False, promptly=False)
    sync.reset()
    sync.before_backward(0, is_last=True)
    (params["a"] * params["b"].nan_to_num(1.0)).sum().backward()
    sync.after_backward(0)
    sync.finish()
    grads = {entry.name: entry.grad for entry in bucket.entries}
    assert bool((grads["a"] == 2).all()) and not grads["b"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mode
def test_narrow_gradients_are_added_up_in_fp32(log: Log, dtype: torch.dtype, mode: Mode) -> None:
    """256 + 1 + 1 is 256 in bf16, 2048 + 1 + 1 is 2048 in fp16."""
    model = Model(log, [named("a")], mode=mode._replace(shards=1))
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    assert torch.tensor(large, dtype=dtype) + 1 == large
    for values in ((large, 1.0), (1.0,)):
        model.sync.before_backward(0, is_last=len(values) == 1)
        for value in values:
            model.sink("a").add(torch.full((ROWS, COLUMNS), value, dtype=dtype))
        model.sync.after_backward(0)
    model.sync.finish()
    got, _ = model.reduced("a")
    assert torch.equal(got, torch.full((ROWS * COLUMNS,), 2 * (large + 2)))
