"""Data plans: against counting by hand, and under any sequence of changes to a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.data.order import DataOrder
from megads.data.plan import SIZE_PERIOD, DataPlan, Mixture, PlannedSource, merged
from megads.errors import DataError


def source(name: str, samples: int, seed: int = 1) -> PlannedSource:
    return PlannedSource.make(name, f"content of {name}", samples, seed)


def begin(sizes: list[int], weights: Any = None, limits: Any = None, skips: Any = ()) -> DataOrder:
    sources = [source(f"s{n}", size) for n, size in enumerate(sizes)]
    limits = tuple(limits) if limits else (None,) * len(sizes)
    return DataOrder(
        DataPlan.begin(sources, Mixture(None if weights is None else tuple(weights), limits, skips))
    )


def read(order: DataOrder, consumed: int, count: int) -> list[tuple[int, int]]:
    """(source, sample) pairs that the `count` samples after `consumed` are."""
    located = order.locate(order.positions(np.arange(consumed, consumed + count)))
    return list(zip(located.source.tolist(), located.sample.tolist(), strict=True))


@pytest.mark.parametrize(
    ("weights", "n", "counts"),
    [
        ([0, 1], 20, [0, 20]),
        ([1, 0], 20, [20, 0]),
        ([0.001, 0.999], 1000, [1, 999]),
        ([0.3, 0.7], 10, [3, 7]),
        ([3, 7], 10, [3, 7]),
    ],
)
def test_counts_by_hand(weights: list[float], n: int, counts: list[int]) -> None:
    order = begin([5, 7], weights)
    assert order.counts(n).tolist() == counts
    pairs = Counter(read(order, 0, n))
    for number, (size, count) in enumerate(zip([5, 7], counts, strict=True)):
        times = [pairs[number, sample] for sample in range(size)]
        assert sum(times) == count, "epochs wrap, no id is past the end"
        assert max(times) - min(times) <= 1


def test_many_tiny_sources_wrap_around() -> None:
    for weights in (None, [1.0] * 300):
        order = begin([1] * 300, weights)
        assert sorted(read(order, 0, 300)) == [(n, 0) for n in range(300)]
        assert Counter(read(order, 0, 900)) == {(n, 0): 3 for n in range(300)}


@pytest.mark.parametrize("asked", [15, 18, 19, 25])
@pytest.mark.parametrize("sizes", [[10], [4, 5, 1]])
def test_partial_epochs_without_weights(sizes: list[int], asked: int) -> None:
    """Each sample once in an epoch; each has been read as often as any other, or once less."""
    pairs = read(begin(sizes), 0, asked)
    assert len(set(pairs[:10])) == 10
    counts = Counter(pairs)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_large_sizes_take_turns_by_a_small_table() -> None:
    order = begin([10**12 + 1, 3 * 10**11 + 7, 5])
    parts = order.plan.segments[0].parts
    assert sum(parts) <= SIZE_PERIOD + 3
    assert parts[2] == 1
    counts = order.counts(10**9)
    assert abs(counts[0] / 10**9 - 1 / 1.3) < 2 / SIZE_PERIOD


def test_sources_of_equal_size_are_not_read_in_step() -> None:
    pairs = read(begin([50, 50], [1, 1]), 0, 100)
    first, second = ([sample for n, sample in pairs if n == k] for k in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    twice = DataPlan.begin([source("s", 50)] * 2, Mixture(None, (None, None)))
    assert len({s.key for s in twice.sources}) == len({s.identity for s in twice.sources}) == 2


def test_limits_by_hand() -> None:
    """4:2:1 with at most 4, any, 1: the first has given all it may after 6, the last after 9."""
    order = begin([100, 100, 100], [4, 2, 1], [4, None, 1])
    assert order.counts(6).tolist() == [4, 2, 0]
    assert order.counts(9).tolist() == [4, 4, 1], "from there on 2:1"
    assert {n for n, _ in read(order, 9, 50)} == {1}
    assert order.plan.supply() is None
    order = begin([100, 100, 100], [2, 1, 1], [2, 5, None])
    assert order.counts(3).tolist() == [2, 1, 0]
    assert order.counts(11).tolist() == [2, 5, 4], "what is left goes on 1:1"
    assert order.counts(20).tolist() == [2, 5, 13]


def test_nothing_is_left_after_all_limits() -> None:
    order = begin([6, 3], None, [6, 3])
    assert order.plan.supply() == 9
    pairs = read(order, 0, 9)
    assert sorted(pairs) == [*((0, n) for n in range(6)), *((1, n) for n in range(3))]
    with pytest.raises(DataError, match=r"data\.limits allow 9 samples"):
        read(order, 9, 1)
    assert begin([6, 3], [1, 0], [4, 3]).plan.supply() == 4, "a zero weight adds nothing"


def test_skips_by_hand() -> None:
    plain, order = begin([20]), begin([20], skips=((2, 5), (7, 8)))
    assert order.positions(np.arange(6)).tolist() == [0, 1, 5, 6, 8, 9]
    assert [order.plan.position(n) for n in range(6)] == [0, 1, 5, 6, 8, 9]
    everything = read(plain, 0, 20)
    assert read(order, 0, 6) == [everything[n] for n in (0, 1, 5, 6, 8, 9)]
    more = Mixture(None, (None,), ((2, 5), (6, 7), (7, 9)))
    later = order.continued([source("s0", 20)], more, consumed=3)
    assert later.skips == ((2, 5), (6, 9))
    assert merged([(5, 7), (0, 2), (2, 3), (6, 6)]) == ((0, 3), (5, 7))


def test_a_skip_that_comes_too_late_changes_nothing_before_it() -> None:
    order = begin([50])
    late = Mixture(None, (None,), ((3, 9), (20, 22)))
    plan = order.continued([source("s0", 50)], late, consumed=6)
    assert plan.skips == ((6, 9), (20, 22))
    again = DataOrder(plan).continued([source("s0", 50)], Mixture(None, (None,)), consumed=10)
    assert again.skips == ((6, 9),), "one that was not reached can be taken back"


def test_unchanged_settings_leave_the_plan_as_it_is() -> None:
    order = begin([5, 9], [0.2, 0.8], skips=((3, 4),))
    sources = [source("s1", 9), source("s0", 5)]  # the same, named in another order
    mixture = Mixture((0.8, 0.2), (None, None), ((3, 4),))
    for consumed in (0, 1, 17):
        plan = order.continued(sources, mixture, consumed)
        assert [s.name for s in plan.sources] == (["s1", "s0"] if consumed == 0 else ["s0", "s1"])
        if consumed:
            assert plan == order.plan


def test_a_source_that_comes_back_goes_on_where_it_was() -> None:
    both, one = [source("a", 10), source("b", 30)], [source("b", 30)]
    order = DataOrder(DataPlan.begin(both, Mixture((1, 1), (None, None))))
    first = [k for n, k in read(order, 0, 8) if n == 0]
    order = DataOrder(order.continued(one, Mixture(None, (None,)), 8))
    assert {n for n, _ in read(order, 8, 10)} == {1}
    order = DataOrder(order.continued(both, Mixture((1, 1), (None, None)), 18))
    again = [k for n, k in read(order, 18, 12) if n == 0]
    assert sorted(first + again) == list(range(10))
    other_seed = [source("a", 10, seed=2), source("b", 30, seed=2)]
    plan = order.continued(other_seed, Mixture((1, 1), (None, None)), 20)
    assert [s.seed for s in plan.sources] == [1, 1, 2, 2], "another order is another source"
    assert plan.segments[-1].parts == (0, 0, 1, 1)


def test_bad_plans_are_refused() -> None:
    values = begin([5, 9], [1, 2]).plan.to_dict()
    assert DataPlan.from_dict(json.loads(json.dumps(values))) == begin([5, 9], [1, 2]).plan
    for spoiled in (
        {},
        {**values, "segments": []},
        {**values, "sources": values["sources"][:1]},
        {**values, "sources": [{"name": "x"}]},
        {**values, "skips": [3]},
    ):
        with pytest.raises(DataError, match="not a data plan"):
            DataPlan.from_dict(spoiled)


@pytest.mark.parametrize(
    ("sizes", "weights", "problem"),
    [
        ([10, 0], [0.5, 0.5], "s1 has a weight but holds no sample"),
        ([10, 10], [1], "1 weights for 2 sources"),
        ([10, 10], [0, 0], "at least one must be above 0"),
        ([10, 10], [-1, 2], "must be a number of at least 0"),
        ([10, 10], [float("nan"), 2], "must be a number of at least 0"),
        ([0, 0], None, "hold no sample"),
    ],
)
def test_what_cannot_be_planned(sizes: list[int], weights: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        begin(sizes, weights)
    begin([10, 0], [1, 0])
    begin([10, 0])


@dataclass
class Run:
    """A run as its user would write it down: what was read of each source, in order."""

    weights: dict[str, int]
    sizes: dict[str, int]
    plan: DataPlan | None = None
    skips: tuple[tuple[int, int], ...] = ()
    consumed: int = 0
    position: int = 0
    streams: dict[str, list[int]] = field(default_factory=dict)
    since: Counter[str] = field(default_factory=Counter)
    """Samples of each source since the weights changed."""

    @property
    def order(self) -> DataOrder:
        """As after a resume: nothing but the saved plan is left."""
        names = list(self.weights)
        mixture = Mixture(tuple(self.weights.values()), (None,) * len(names), self.skips)
        sources = [source(name, self.sizes[name]) for name in names]
        if self.plan is None:
            self.plan = DataPlan.begin(sources, mixture)
        saved = DataPlan.from_dict(json.loads(json.dumps(self.plan.to_dict())))
        self.plan = DataOrder(saved).continued(sources, mixture, self.consumed)
        return DataOrder(self.plan)

    def step(self, count: int, order: DataOrder) -> None:
        positions = order.positions(np.arange(self.consumed, self.consumed + count))
        after = int(positions[-1]) + 1
        for at in range(self.position, after):  # skipped ones included
            located = order.locate(np.asarray([at]))
            name = order.plan.sources[int(located.source[0])].name
            self.streams.setdefault(name, []).append(int(located.sample[0]))
            self.since[name] += 1
            length, total = sum(self.since.values()), sum(self.weights.values())
            for other, weight in self.weights.items():
                assert abs(self.since[other] * total - weight * length) < total, "off the target"
        assert {name for name, n in self.since.items() if n} <= {
            name for name, weight in self.weights.items() if weight
        }
        self.position, self.consumed = after, self.consumed + count


CHANGES = st.one_of(
    st.tuples(st.just("steps"), st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=4)),
    st.tuples(st.just("weights"), st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)),
    st.tuples(st.just("skip"), st.integers(1, 12)),
    st.tuples(st.just("rollback"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    changes=st.lists(CHANGES, min_size=1, max_size=10),
)
def test_no_sample_twice_in_an_epoch_whatever_happens(
    sizes: list[int], changes: list[tuple[str, Any]]
) -> None:
    """Batches of any size (a ramp-up, another dp), resumes, new weights and sources, skips."""
    names = ["a", "b", "c", "d"]
    run = Run({"a": 3, "b": 1}, dict(zip(names, sizes, strict=True)))
    run.step(4, run.order)
    saved = (run.plan, run.consumed, run.position, {k: [*v] for k, v in run.streams.items()})
    for kind, value in changes:
        if kind == "steps":
            order = run.order
            for count in value:
                run.step(count, order)
        elif kind == "skip":
            here = run.order.plan.position(run.consumed)
            run.skips = (*run.skips, (here, here + value))
        elif kind == "rollback":  # to the first checkpoint, whose samples are read again
            plan, run.consumed, run.position, streams = saved
            run.plan, run.streams = plan, {k: [*v] for k, v in streams.items()}
            run.weights = {"a": 3, "b": 1}
            run.since = Counter({k: len(v) for k, v in streams.items()})
        else:
            wanted = {name: weight for name, weight in zip(names, value, strict=True) if weight}
            if wanted != run.weights:
                # A source of weight 0 and one that is not named are the same.
                skipped = run.order.plan.position(run.consumed) - run.position
                if skipped:  # what is skipped still belongs to the old weights
                    run.step(1, run.order)
                before = [w * sum(wanted.values()) for w in (run.weights.get(n, 0) for n in names)]
                after = [w * sum(run.weights.values()) for w in (wanted.get(n, 0) for n in names)]
                run.weights = wanted
                if before != after:
                    run.since = Counter()
        run.step(2, run.order)
    for name, stream in run.streams.items():
        size = run.sizes[name]
        for at in range(0, len(stream), size):
            epoch = stream[at : at + size]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(size))


def test_a_plan_that_forgets_what_was_given_is_seen() -> None:
    """The negative control of the property: the new segment starts its sources again."""
    run = Run({"a": 1, "b": 1}, {"a": 40, "b": 40})
    run.step(20, run.order)
    run.weights = {"a": 3, "b": 1}
    plan = run.order.plan
    assert len(plan.segments) == 2
    forgetful = replace(plan.segments[1], given=(0, 0))
    run.since = Counter()
    run.step(20, DataOrder(replace(plan, segments=(plan.segments[0], forgetful))))
    assert len(set(run.streams["a"])) < len(run.streams["a"])


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any),
    limits=st.lists(st.one_of(st.none(), st.integers(1, 15)), min_size=5, max_size=5),
)
def test_limits_hold_and_the_rest_keeps_its_mix(parts: list[int], limits: list[int | None]) -> None:
    """Against a count of one sample after the other."""
    number = len(parts)
    order = begin([7] * number, parts, limits[:number])
    supply = order.plan.supply()
    given, since = [0] * number, [0] * number
    active = list(parts)
    for name, _ in read(order, 0, 60 if supply is None else min(supply, 60)):
        given[name] += 1
        since[name] += 1
        assert active[name], "it has no weight, or its limit was reached"
        for n, part in enumerate(active):
            assert abs(since[n] * sum(active) - part * sum(since)) < sum(active)
        if given[name] == limits[name]:
            active[name], since = 0, [0] * number
    if supply is not None:
        assert supply == sum(limits[n] or 0 for n in range(number) if parts[n])
