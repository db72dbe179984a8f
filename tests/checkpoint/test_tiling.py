from __future__ import annotations

import random
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.checkpoint.tiling import intersect, tiling_problem


def cut(draw: random.Random, offset: tuple, shape: tuple, depth: int) -> list:
    """Cut a box at random into boxes that tile it."""
    dims = [d for d, size in enumerate(shape) if size > 1]
    if depth == 0 or not dims:
        return [(offset, shape)]
    dim = draw.choice(dims)
    at = draw.randrange(1, shape[dim])
    low = (*shape[:dim], at, *shape[dim + 1 :])
    high = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    moved = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
    return cut(draw, offset, low, depth - 1) + cut(draw, moved, high, depth - 1)


def counts(shape: tuple, boxes: list) -> numpy.ndarray:
    """How often each element is covered, by painting."""
    painted = numpy.zeros(shape, int)
    for offset, extent in boxes:
        painted[tuple(slice(o, o + s) for o, s in zip(offset, extent, strict=True))] += 1
    return painted


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 4)
)
def test_cut_boxes_tile_and_damage_is_seen(shape, seed, depth):
    draw, shape = random.Random(seed), tuple(shape)
    boxes = cut(draw, (0,) * len(shape), shape, depth)
    draw.shuffle(boxes)
    assert tiling_problem(shape, boxes) is None
    victim = draw.randrange(len(boxes))
    assert "cover" in tiling_problem(shape, boxes[:victim] + boxes[victim + 1 :])
    assert "overlaps" in tiling_problem(shape, [*boxes, boxes[victim]])


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32))
def test_random_boxes_agree_with_painting(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(1, 4)))
    boxes = []
    for _ in range(draw.randrange(1, 5)):
        offset = tuple(draw.randrange(size) for size in shape)
        extent = tuple(draw.randrange(1, s - o + 1) for o, s in zip(offset, shape, strict=True))
        boxes.append((offset, extent))
    exact = bool((counts(shape, boxes) == 1).all())
    assert (tiling_problem(shape, boxes) is None) == exact
    common = intersect(boxes[0], boxes[-1])
    both = counts(shape, [boxes[0]]) * counts(shape, [boxes[-1]])
    assert both.sum() == (counts(shape, [common]).sum() if common else 0)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 4))],
        [((-1, 0), (4, 3))],
        [((0, 0), (4, 0))],
        [((0,), (4,))],
        [((0, 0), (4,))],
    ],
)
def test_boxes_outside_or_of_wrong_rank_are_refused(boxes):
    assert tiling_problem((4, 3), boxes)


def test_a_scalar_is_one_piece():
    assert tiling_problem((), [((), ())]) is None
    assert tiling_problem((), [((), ()), ((), ())])
    assert tiling_problem((), [])


def test_many_pieces_are_quick():
    """A matrix over tp=8 columns and many flat ranges; looking at all pairs would take minutes."""
    boxes = [((r, c * 16), (1, 16)) for r in range(6000) for c in range(8)]
    start = time.perf_counter()
    assert tiling_problem((6000, 128), boxes) is None
    assert time.perf_counter() - start < 20.0
