"""Each region does what its table says, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.tensor_parallel import regions
from tests.distributed import Workers, mesh_for

TOKENS, WIDTH = 12, 5


def values(rank: int, seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def apply(rank: int, world_size: int, name: str, rows_in: int, rows_out: int) -> list[Tensor]:
    """Result and input gradient of one rank."""
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp
    x = values(rank, 1, rows_in).requires_grad_()
    out = getattr(regions, name)(x * 1.0, axis)
    (grad,) = torch.autograd.grad(out, x, values(rank, 2, rows_out))
    return [out.detach(), grad]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ["copy", "reduce", "gather", "reduce_scatter"])
def test_region(workers: Workers, name: str, tp: int) -> None:
    share = TOKENS // tp
    rows_in = share if name == "gather" else TOKENS
    rows_out = share if name == "reduce_scatter" else TOKENS
    results = workers(tp).run(apply, name, rows_in, rows_out)
    inputs = [values(rank, 1, rows_in) for rank in range(tp)]
    grads = [values(rank, 2, rows_out) for rank in range(tp)]
    total_in, total_grad = sum(inputs), sum(grads)
    for rank, (out, grad) in enumerate(results):
        mine = slice(rank * share, (rank + 1) * share)
        expected: dict[str, tuple[Tensor, Tensor]] = {
            "copy": (inputs[rank], total_grad),  # type: ignore[dict-item]
            "reduce": (total_in, grads[rank]),  # type: ignore[dict-item]
            "gather": (torch.cat(inputs), total_grad[mine]),  # type: ignore[index]
            "reduce_scatter": (total_in[mine], torch.cat(grads)),  # type: ignore[index]
        }
        torch.testing.assert_close(out, expected[name][0])
        torch.testing.assert_close(grad, expected[name][1])


@pytest.mark.parametrize("name", ["copy", "reduce", "gather", "reduce_scatter"])
def test_one_rank_leaves_no_node(name: str) -> None:
    x = torch.zeros(3, requires_grad=True)
    assert getattr(regions, name)(x, Axis("tp")) is x
