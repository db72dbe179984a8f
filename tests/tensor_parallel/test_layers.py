"""Split layers against whole ones; gradient sinks; the fused linear against regions + F.linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.parallel.sharding import Init, ParamSpec, Part
from megads.tensor_parallel import regions
from megads.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)
from tests.distributed import Workers, mesh_for
from tests.models.stages import local_piece

TOKENS, IN, OUT, VOCAB = 12, 20, 28, 37
HERE = {"sequence_parallel": False, "dtype": torch.float32, "device": "cpu"}
NORMAL = Init("normal", 0.1)
COLUMN = ParamSpec("w", (OUT, IN), "matrix", NORMAL, tp_dim=0, parts=(Part("a", 4), Part("b", 24)))
COLUMN_BIAS = ParamSpec("b", (OUT,), "bias", NORMAL, tp_dim=0, parts=COLUMN.parts)
ROW = ParamSpec("w", (OUT, IN), "matrix", NORMAL, tp_dim=1)
ROW_BIAS = ParamSpec("b", (OUT,), "bias", NORMAL)
WORDS = ParamSpec("e", (VOCAB, IN), "embedding", NORMAL, tp_dim=0, pad_multiple=8)


class RecordingSink:
    """A GradSink that sums into a tensor and remembers how it was called."""

    def __init__(self, shape: torch.Size) -> None:
        self.total, self.calls = torch.zeros(shape), [""]

    def add(self, grad: Tensor) -> None:
        self.calls.append("add")
        self.total += grad

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        self.calls.append("add_outer")
        self.total += grad_output.t() @ inputs

    def add_rows(self, rows: Tensor, grad: Tensor) -> None:
        self.calls.append("add_rows")
        self.total.index_add_(0, rows, grad)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(param: nn.Parameter, spec: ParamSpec, axis: Axis, seed: int) -> None:
    with torch.no_grad():
        piece = local_piece(spec, randn(*spec.shape, seed=seed), axis.size, axis.index)
        param.copy_(piece.nan_to_num(nan=1e6))


def column_part(full: Tensor, axis: Axis) -> Tensor:
    """This rank's columns of `[tokens, OUT]`, in the order of its rows of the weight."""
    return local_piece(COLUMN_BIAS, full.t().contiguous(), axis.size, axis.index)


def shard(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.index]


def linear_rank(
    rank: int, world_size: int, kind: str, bias: bool, sp: bool, sink: bool
) -> dict[str, Any]:
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp if world_size > 1 else Axis("tp")
    specs = (COLUMN, COLUMN_BIAS) if kind == "column" else (ROW, ROW_BIAS)
    make = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = make(specs[0], specs[1] if bias else None, axis, **HERE | {"sequence_parallel": sp})
    fill(layer.weight, specs[0], axis, 1)
    if layer.bias is not None:
        fill(layer.bias, specs[1], axis, 2)
    weight: Any = layer.weight
    if sink:
        weight.grad_sink = RecordingSink(weight.shape)
    x, grad = randn(TOKENS, IN, seed=3), randn(TOKENS, OUT, seed=4)
    if kind == "column":
        grad = column_part(grad, axis).t()
        x = shard(x, axis) if sp else x
    else:
        x = x.chunk(axis.size, 1)[axis.index]
        grad = shard(grad, axis) if sp else grad
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    results = {"out": out.detach(), "x": x.grad, "weight": weight.grad}
    if bias:
        results["bias"] = layer.bias.grad  # type: ignore[union-attr]
    if sink:
        results |= {"sunk": weight.grad_sink.total, "calls": weight.grad_sink.calls[1:]}
    return results


@pytest.mark.parametrize("sink", [False, True], ids=["autograd", "sink"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear(workers: Workers, kind: str, tp: int, sp: bool, bias: bool, sink: bool) -> None:
    arguments = (kind, bias, sp, sink)
    results = (
        [linear_rank(0, 1, *arguments)] if tp == 1 else workers(tp).run(linear_rank, *arguments)
    )
    x = randn(TOKENS, IN, seed=3).requires_grad_()
    weight, add = randn(OUT, IN, seed=1).requires_grad_(), randn(OUT, seed=2).requires_grad_()
    out = F.linear(x, weight, add if bias else None)
    out.backward(randn(TOKENS, OUT, seed=4))
    assert x.grad is not None and weight.grad is not None
    bias_total = torch.zeros(OUT)
    for rank, result in enumerate(results):
        axis = Axis("tp", tp, rank)
        spec = COLUMN if kind == "column" else ROW
        weight_grad = result["weight"]
        if sink:
            assert weight_grad is None and result["calls"] == ["add_outer"]
            weight_grad = result["sunk"]
        expected = local_piece(spec, weight.grad, tp, rank)
        torch.testing.assert_close(weight_grad, expected, rtol=1e-4, atol=1e-5)
        if kind == "column":
            part = column_part(out.detach(), axis).t()
            x_grad = shard(x.grad, axis) if sp else x.grad
        else:
            part = shard(out.detach(), axis) if sp else out.detach()
            x_grad = x.grad.chunk(tp, 1)[rank]
        torch.testing.assert_close(result["out"], part, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["x"], x_grad, rtol=1e-4, atol=1e-5)
        if bias and kind == "column":
            piece = local_piece(COLUMN_BIAS, add.grad, tp, rank)  # type: ignore[arg-type]
            torch.testing.assert_close(result["bias"], piece, rtol=1e-4, atol=1e-5)
        elif bias:
            bias_total += result["bias"] / (1 if sp else tp)
    if bias and kind == "row":
        torch.testing.assert_close(bias_total, add.grad, rtol=1e-4, atol=1e-5)


def fused_and_plain(rank: int, world_size: int, sp: bool) -> list[list[Tensor]]:
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp
    results = []
    for fused in (True, False):
        x = shard(randn(TOKENS, IN), axis) if sp else randn(TOKENS, IN)
        x = x.clone().requires_grad_()
        weight = randn(7, IN, seed=10 + rank).requires_grad_()
        bias = randn(7, seed=20 + rank).requires_grad_()
        if fused:
            out = column_parallel(x, weight, bias, axis, sequence_parallel=sp)
        else:
            enter = regions.gather if sp else regions.copy
            out = F.linear(enter(x, axis), weight, bias)
        grads = torch.autograd.grad(out, [x, weight, bias], randn(TOKENS, 7, seed=30 + rank))
        results.append([out.detach(), *grads])
    return results


@pytest.mark.parametrize("sp", [False, True])
def test_fused_linear_equals_regions(workers: Workers, sp: bool) -> None:
    for fused, plain in workers(2).run(fused_and_plain, sp):
        for a, b in zip(fused, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_only_the_shard_is_kept_under_sequence_parallelism(workers: Workers) -> None:
    assert workers(2).run(saved_rows) == [[6, 7], [6, 7]]


def saved_rows(rank: int, world_size: int) -> list[int]:
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[0])
        return tensor

    weight = randn(7, IN).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        column_parallel(randn(TOKENS // 2, IN), weight, None, axis, sequence_parallel=True)
    return sorted(kept)


IDS = torch.tensor([3, 36, 0, 3, 3, 20, 17, 36, 5, 31, 16, 15])


def embedding_rank(rank: int, world_size: int, sp: bool, sink: bool) -> dict[str, Any]:
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp if world_size > 1 else Axis("tp")
    layer = VocabParallelEmbedding(WORDS, axis, **HERE | {"sequence_parallel": sp})
    fill(layer.weight, WORDS, axis, 1)
    weight: Any = layer.weight
    if sink:
        weight.grad_sink = RecordingSink(weight.shape)
    out = layer(IDS)
    grad = randn(TOKENS, IN, seed=2)
    out.backward(shard(grad, axis) if sp else grad)
    result = {"out": out.detach(), "weight": weight.grad}
    if sink:
        assert weight.grad is None and weight.grad_sink.calls[1:] == ["add_rows"]
        result["weight"] = weight.grad_sink.total
    return result


@pytest.mark.parametrize("sink", [False, True], ids=["autograd", "sink"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (6, False)])
def test_embedding(workers: Workers, tp: int, sp: bool, sink: bool) -> None:
    """At tp 6 the last rank holds padding only: 6 x 8 rows for 37 words."""
    results = (
        [embedding_rank(0, 1, sp, sink)] if tp == 1 else workers(tp).run(embedding_rank, sp, sink)
    )
    weight = randn(VOCAB, IN, seed=1).requires_grad_()
    out = F.embedding(IDS, weight)
    out.backward(randn(TOKENS, IN, seed=2))
    assert weight.grad is not None
    for rank, result in enumerate(results):
        expected = out.detach()
        expected = expected.chunk(tp)[rank] if sp else expected
        torch.testing.assert_close(result["out"], expected)
        piece = local_piece(WORDS, weight.grad, tp, rank).nan_to_num(nan=0.0)
        torch.testing.assert_close(result["weight"], piece)
