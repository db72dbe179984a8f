"""Which elements of a global tensor a rank holds, against a slicing rule written out here.

Every element of a global tensor is stamped with its own number. Local tensors are filled by the
rule in `held_rows`, which enumerates rows one by one; `PADDING` marks what is not in the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.parallel.sharding import Box, Init, ParamSpec, Part, flat_range_boxes

PADDING = -1
Array = npt.NDArray[np.int64]
BoxesOf = Callable[[ParamSpec, int, int, int, int], Iterator[Box]]


def spec_of(shape: tuple[int, ...], **kwargs: object) -> ParamSpec:
    return ParamSpec("x", shape, "matrix", Init(), **kwargs)  # type: ignore[arg-type]


def held_rows(spec: ParamSpec, tp: int, rank: int) -> list[int]:
    """Global indices along the tp dim in the local order of `rank`; PADDING where there is none."""
    assert spec.tp_dim is not None
    size = spec.shape[spec.tp_dim]
    if spec.pad_multiple:
        share = spec.pad_multiple
        while share * tp < size:
            share += spec.pad_multiple
        return [i if i < size else PADDING for i in range(rank * share, (rank + 1) * share)]
    rows, base = [], 0
    for part in spec.parts or (Part("row", size),):
        for unit in range(part.units):
            if part.units >= tp:
                is_held = unit // (part.units // tp) == rank
            else:
                is_held = rank // (tp // part.units) == unit
            if is_held:
                rows += [base + unit * part.unit_size + i for i in range(part.unit_size)]
        base += part.units * part.unit_size
    return rows


def stamped(spec: ParamSpec, tp: int, rank: int) -> tuple[Array, Array]:
    """(the global tensor, the local tensor of `rank`)."""
    whole = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    if spec.tp_dim is None:
        return whole, whole
    indices = np.array(held_rows(spec, tp, rank), dtype=np.int64)
    local = whole.take(indices.clip(0), axis=spec.tp_dim)
    np.moveaxis(local, spec.tp_dim, 0)[indices == PADDING] = PADDING
    return whole, local


def check(
    spec: ParamSpec, tp: int, cuts: list[float], boxes_of: BoxesOf = flat_range_boxes
) -> None:
    """Boxes of every rank's tensor, cut at `cuts` (fractions of it), hold exactly what they say."""
    whole, _ = stamped(spec, tp, 0)
    copies: list[list[int]] = [[] for _ in range(whole.size)]
    for rank in range(tp):
        _, local = stamped(spec, tp, rank)
        assert spec.local_shape(tp) == local.shape
        flat = local.reshape(-1)
        edges = sorted({0, flat.size, *(int(cut * flat.size) for cut in cuts)})
        for start, stop in itertools.pairwise(edges):
            end = start
            for box in boxes_of(spec, tp, rank, start, stop):
                assert end <= box.flat_start and box.numel > 0
                assert np.all(flat[end : box.flat_start] == PADDING), "a real element left out"
                end = box.flat_start + box.numel
                assert end <= stop
                slices = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                held = flat[box.flat_start : end].reshape(box.shape)
                assert np.array_equal(whole[slices], held), "not the elements that it says"
                for element in held.reshape(-1):
                    copies[element].append(box.copy_index)
            assert np.all(flat[end:stop] == PADDING), "a real element left out"
    for element in copies:
        assert sorted(element) == list(range(len(element))), "exactly one copy has index 0"
        assert element, "an element that no rank holds"


@st.composite
def specs(draw: st.DrawFn) -> tuple[ParamSpec, int]:
    """A spec of any kind that a model has, and a tensor-parallel size that it can be cut for."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    columns = draw(st.integers(1, 5))
    is_vector = draw(st.booleans())
    kind = draw(st.sampled_from(["qkv", "gate_up", "vocabulary", "column", "row", "replicated"]))
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    if kind == "qkv":
        kv_heads = draw(st.sampled_from([*divisors, 2 * tp]))
        heads = math.lcm(kv_heads, tp) * draw(st.integers(1, 2))
        width = draw(st.integers(1, 3))
        parts = (Part("q", heads, width), Part("k", kv_heads, width), Part("v", kv_heads, width))
    elif kind == "gate_up":
        rows = tp * draw(st.integers(1, 4))
        parts = (Part("gate", rows), Part("up", rows))
    if kind in ("qkv", "gate_up"):
        size = sum(part.size for part in parts)
        shape = (size,) if is_vector else (size, columns)
        return spec_of(shape, tp_dim=0, parts=parts), tp
    if kind == "vocabulary":
        multiple = draw(st.sampled_from([1, 2, 5, 8]))
        shape = (draw(st.integers(1, 40)), columns)
        return spec_of(shape, tp_dim=0, pad_multiple=multiple), tp
    if kind == "column":
        rows = tp * draw(st.integers(1, 4))
        return spec_of((rows,) if is_vector else (rows, columns), tp_dim=0), tp
    if kind == "row":
        return spec_of((draw(st.integers(1, 6)), tp * columns), tp_dim=1), tp
    rows = draw(st.integers(1, 12))
    return spec_of((rows,) if is_vector else (rows, columns)), tp


CUTS = st.lists(st.floats(0, 1), max_size=6)


@settings(max_examples=150, deadline=None)
@given(case=specs(), cuts=CUTS)
def test_boxes_hold_what_they_say_and_tile_the_tensor_once(
    case: tuple[ParamSpec, int], cuts: list[float]
) -> None:
    check(*case, cuts)


GROUPED = spec_of(
    ((8 + 2 + 2) * 3, 5),
    tp_dim=0,
    parts=(Part("q", 8, 3), Part("k", 2, 3), Part("v", 2, 3)),
)
PADDED = spec_of((9, 4), tp_dim=0, pad_multiple=4)
"""On 4 ranks of 4 rows each, the last one holds padding only."""


def test_examples_by_hand() -> None:
    assert [held_rows(PADDED, 4, rank) for rank in (1, 2, 3)] == [
        [4, 5, 6, 7],
        [8, -1, -1, -1],
        [-1] * 4,
    ]
    assert [list(flat_range_boxes(PADDED, 4, rank)) for rank in (1, 2, 3)] == [
        [Box(0, (4, 0), (4, 4))],
        [Box(0, (8, 0), (1, 4))],
        [],
    ]
    assert held_rows(GROUPED, 4, 3) == [18, 19, 20, 21, 22, 23, 27, 28, 29, 33, 34, 35]
    assert list(flat_range_boxes(GROUPED, 4, 3)) == [
        Box(0, (18, 0), (6, 5), copy_index=0),
        Box(30, (27, 0), (3, 5), copy_index=1),
        Box(45, (33, 0), (3, 5), copy_index=1),
    ]
    for spec in (GROUPED, PADDED):
        check(spec, 4, [0.3, 0.55, 0.8])


def test_a_range_inside_a_matrix_is_a_partial_row_whole_rows_and_a_partial_row() -> None:
    spec = spec_of((6, 8), tp_dim=1)
    assert list(flat_range_boxes(spec, 2, 1, 3, 18)) == [
        Box(3, (0, 7), (1, 1)),
        Box(4, (1, 4), (3, 4)),
        Box(16, (4, 4), (1, 2)),
    ]
    assert list(flat_range_boxes(spec, 2, 1, 5, 7)) == [Box(5, (1, 5), (1, 2))]
    assert list(flat_range_boxes(spec, 2, 1, 7, 7)) == []


def as_one_block(spec: ParamSpec, tp: int, rank: int, start: int, stop: int) -> Iterator[Box]:
    """Rows cut into equal runs as if nothing were fused."""
    return flat_range_boxes(dataclasses.replace(spec, parts=()), tp, rank, start, stop)


def without_copies(spec: ParamSpec, tp: int, rank: int, start: int, stop: int) -> Iterator[Box]:
    """Every copy says it is the one that counts."""
    for box in flat_range_boxes(spec, tp, rank, start, stop):
        yield dataclasses.replace(box, copy_index=0)


def without_last_box(spec: ParamSpec, tp: int, rank: int, start: int, stop: int) -> Iterator[Box]:
    yield from list(flat_range_boxes(spec, tp, rank, start, stop))[:-1]


def with_padding(spec: ParamSpec, tp: int, rank: int, start: int, stop: int) -> Iterator[Box]:
    """Padding is taken for rows of a larger vocabulary."""
    rows = spec.local_shape(tp)[0] * tp
    larger = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]))
    return flat_range_boxes(larger, tp, rank, start, stop)


@pytest.mark.parametrize(
    "spec, tp, broken",
    [
        (GROUPED, 2, as_one_block),
        (GROUPED, 4, without_copies),
        (GROUPED, 4, without_last_box),
        (PADDED, 4, without_last_box),
        (PADDED, 4, with_padding),
    ],
)
def test_negative_control_the_check_notices(spec: ParamSpec, tp: int, broken: BoxesOf) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(spec, tp, [0.4], broken)


def test_copies() -> None:
    heads = Part("k", 4, 16)
    assert [heads.copies(tp) for tp in (1, 2, 4, 8, 12)] == [1, 1, 1, 2, 3]
    assert heads.size == 64
    assert [heads.span(8, index) for index in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert GROUPED.has_copies(4) and not GROUPED.has_copies(2)
    assert not spec_of((3, 4)).has_copies(4)


@pytest.mark.parametrize(
    "units, tp, message",
    [
        (6, 4, r"6 k units cannot be split over tp=4"),
        (5, 2, r"5 k units cannot be split over tp=2"),
        (3, 4, r"tp=4 is not a multiple of 3 k units"),
        (4, 6, r"tp=6 is not a multiple of 4 k units"),
    ],
)
def test_heads_that_do_not_fit_are_refused(units: int, tp: int, message: str) -> None:
    part = Part("k", units, 8)
    with pytest.raises(ValueError, match=message):
        part.copies(tp)
    spec = spec_of((part.size, 2), tp_dim=0, parts=(part,))
    for use in (lambda: spec.local_shape(tp), lambda: list(flat_range_boxes(spec, tp, 0))):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_replicated_tensor_has_no_slabs() -> None:
    with pytest.raises(ValueError, match="x is replicated"):
        spec_of((3, 4)).slabs(2, 0)
    assert spec_of((3, 4)).numel == 12 and spec_of((3, 4)).local_shape(2) == (3, 4)
