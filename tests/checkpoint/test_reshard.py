from __future__ import annotations

import random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.checkpoint.manifest import PieceEntry, TensorEntry
from megads.checkpoint.reshard import PieceInfo, assign_writers, plan_reads
from megads.errors import CheckpointError
from tests.checkpoint.test_tiling import cut

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def stored(shape: tuple, boxes: list) -> TensorEntry:
    pieces = tuple(
        PieceEntry(file="a.safetensors", tensor=str(i), offset=offset, shape=extent)
        for i, (offset, extent) in enumerate(boxes)
    )
    return TensorEntry(dtype="float32", shape=shape, pieces=pieces)


def box_of(array: numpy.ndarray, offset: tuple, shape: tuple) -> numpy.ndarray:
    return array[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]


@settings(deadline=None, max_examples=50)
@given(shapes, st.integers(0, 2**32))
def test_any_cut_reads_into_any_other(shape, seed):
    draw, origin = random.Random(seed), (0,) * len(shape)
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    boxes = cut(draw, origin, shape, 4)
    entry = stored(shape, boxes)
    for offset, extent in cut(draw, origin, shape, 4):
        target = numpy.full(extent, -1)
        for read in plan_reads("w", entry, offset, extent):
            assert (target[read.target] == -1).all(), "written twice"
            target[read.target] = box_of(whole, *boxes[int(read.tensor)])[read.source]
        assert (target == box_of(whole, offset, extent)).all()


@settings(deadline=None, max_examples=50)
@given(shapes, st.integers(0, 2**32))
def test_only_pieces_that_are_needed_are_read(shape, seed):
    draw = random.Random(seed)
    boxes = cut(draw, (0,) * len(shape), shape, 4)
    for index, (offset, extent) in enumerate(boxes):
        (read,) = plan_reads("w", stored(shape, boxes), offset, extent)
        assert read.tensor == str(index)


def test_a_gap_names_key_and_box():
    entry = stored((4, 6), [((0, 0), (4, 6))])
    with pytest.raises(CheckpointError, match=r"param/w.*10 of the 15.*\[2, 0\] of shape \[3, 5\]"):
        plan_reads("param/w", entry, (2, 0), (3, 5))
    with pytest.raises(CheckpointError, match=r"param/w.*\[4, 6\]"):
        plan_reads("param/w", entry, (0,), (4,))


def info(key="w", offset=(0,), shape=(4,), dtype="float32", whole=(4,)) -> PieceInfo:
    return PieceInfo(key, dtype, whole, offset, shape)


def test_copies_are_written_once_and_spread():
    table = [info(f"k{i}") for i in range(9)]
    writes = assign_writers([table, table, table])
    assert sorted(i for w in writes for i in w) == list(range(9))
    assert [len(w) for w in writes] == [3, 3, 3]


def test_copies_go_to_ranks_with_less_of_their_own():
    own = [info("big", whole=(100,), shape=(100,))]
    shared = [info("a"), info("b")]
    assert assign_writers([own + shared, shared]) == [[0], [0, 1]]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32))
def test_every_piece_exactly_once_and_the_same_on_every_rank(seed):
    draw = random.Random(seed)
    tables: list[list[PieceInfo]] = [[] for _ in range(draw.randrange(1, 6))]
    everything = []
    for k in range(4):
        for offset, shape in cut(draw, (0, 0), (5, 7), 3):
            piece = info(f"k{k}", offset, shape, whole=(5, 7))
            everything.append(piece)
            for table in draw.sample(tables, draw.randrange(1, len(tables) + 1)):
                table.append(piece)
    writes = assign_writers(tables)
    written = [table[i] for table, w in zip(tables, writes, strict=True) for i in w]
    assert sorted(written) == sorted(everything)
    assert assign_writers([list(t) for t in tables]) == writes


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[info(shape=(3,))]], "cover 3 of the 4"),
        ([[info()], [info(offset=(2,), shape=(2,))]], "overlaps"),
        ([[info(shape=(2,))], [info(offset=(2,), shape=(2,), dtype="bfloat16")]], "bfloat16"),
        ([[info(shape=(2,))], [info(offset=(2,), shape=(3,), whole=(5,))]], r"\[5\]"),
        ([[info(offset=(1,))]], "not inside"),
    ],
)
def test_pieces_that_do_not_make_a_tensor_are_refused(tables, message):
    with pytest.raises(CheckpointError, match=rf"w: .*{message}"):
        assign_writers(tables)
