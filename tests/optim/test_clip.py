"""The gradient norm: accurate at any size, the same however the gradients are cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megads.optim.clip import ROW, clip_coefficient, global_norm, sum_of_squares
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from tests.distributed import Workers, mesh_for


def gradients(numel: int, seed: int = 0) -> Tensor:
    """fp32 values whose sizes spread over some six orders of magnitude, as gradients' do."""
    source = torch.Generator().manual_seed(seed)
    size = torch.randn(numel, generator=source).mul_(2.0).exp_()
    return size.mul_(torch.randn(numel, generator=source)).mul_(1e-4)


def exact(flat: Tensor) -> float:
    return math.fsum(x * x for x in flat.tolist())


def test_sixteen_million_elements() -> None:
    flat = gradients(2**24 + 7)
    expected = flat.double().square().sum().item()
    assert sum_of_squares(flat).item() == pytest.approx(expected, rel=1e-6)
    one_by_one = np.cumsum(flat.square().numpy(), dtype=np.float32)[-1]
    assert abs(one_by_one / expected - 1) > 1e-5, "the negative control: fp32 is not enough"


@pytest.mark.parametrize("numel", [0, 1, 2, 63, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 5])
def test_any_number_of_elements(numel: int) -> None:
    flat = gradients(numel, seed=numel)
    total = sum_of_squares(flat)
    assert total.dtype == torch.float64 and total.shape == ()
    assert total.item() == pytest.approx(exact(flat), rel=1e-6, abs=0)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 5 * ROW + 100), max_size=5), seed=st.integers(0, 99))
def test_the_sum_does_not_depend_on_how_it_is_cut(cuts: list[int], seed: int) -> None:
    flat = gradients(5 * ROW + 100, seed)
    edges = [0, *sorted(cuts), flat.numel()]
    pieces = [flat[a:b] for a, b in itertools.pairwise(edges)]
    cut = sum(sum_of_squares(piece).item() for piece in pieces)
    assert cut == pytest.approx(sum_of_squares(flat).item(), rel=1e-6)
    assert global_norm(pieces, Mesh.single()) ** 2 == pytest.approx(cut, rel=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, ROW + 3, 2 * ROW - 1, 2 * ROW, 2 * ROW + 9])
def test_one_bad_element_anywhere_shows(bad: float, place: int) -> None:
    """In a whole row, at its end, in the rest after the last whole row."""
    flat = gradients(2 * ROW + 10)
    assert math.isfinite(global_norm([flat], Mesh.single()))
    flat[place] = bad
    norm = global_norm([gradients(5), flat], Mesh.single())
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def test_no_gradients_at_all() -> None:
    assert global_norm([], Mesh.single()) == 0.0
    assert global_norm([torch.empty(0)], Mesh.single()) == 0.0


def norm_of_parts(rank: int, world: int, bad_rank: int | None) -> float:
    """Each rank holds the elements `rank`, `rank + world`, ... of one vector."""
    flat = gradients(3 * ROW + 11)[rank::world].clone()
    if rank == bad_rank:
        flat[-1] = math.inf
    middle = flat.numel() // 2
    return global_norm([flat[:middle], flat[middle:]], mesh_for(ParallelLayout(dp=world), rank))


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_get_the_norm_of_everything(workers: Workers, world: int) -> None:
    norms = workers(world).run(norm_of_parts, None)
    assert norms == [pytest.approx(math.sqrt(exact(gradients(3 * ROW + 11))), rel=1e-6)] * world
    assert len(set(norms)) == 1, "bitwise equal"


def test_what_is_bad_on_one_rank_is_bad_on_all(workers: Workers) -> None:
    assert workers(2).run(norm_of_parts, 1) == [math.inf] * 2


@pytest.mark.parametrize("size", [0.001, 0.5, 0.999, 1.0, 1.5, 300.0])
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 7.0])
def test_coefficient_is_that_of_torch(size: float, max_norm: float) -> None:
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.full((5,), size, dtype=torch.float32)
    norm = global_norm([param.grad.clone()], Mesh.single())
    scaled = param.grad * clip_coefficient(norm, max_norm)
    nn.utils.clip_grad_norm_([param], max_norm)
    torch.testing.assert_close(scaled, param.grad)


def test_coefficient_at_its_ends() -> None:
    assert clip_coefficient(1e30, 0.0) == 1.0, "0 does not clip"
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(2.0, 1.0) == pytest.approx(0.5, rel=1e-5)
