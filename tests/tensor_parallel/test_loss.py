"""The vocab-parallel cross entropy against F.cross_entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.kernels.reference import ReferenceCrossEntropy
from megads.kernels.torch_native import InPlaceCrossEntropy
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.tensor_parallel.loss import vocab_parallel_cross_entropy
from tests.distributed import Workers, mesh_for

TOKENS = 23
KERNELS = {"reference": ReferenceCrossEntropy(), "torch": InPlaceCrossEntropy()}


def inputs(vocab: int, scale: float, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, vocab, generator=source) * scale
    targets = torch.randint(0, vocab, (TOKENS,), generator=source)
    targets[0], targets[1] = 0, vocab - 1
    if not masked:
        return logits, targets, None
    mask = torch.rand(TOKENS, generator=source) * (torch.rand(TOKENS, generator=source) < 0.6)
    targets[mask == 0] = -100
    return logits, targets, mask


def rank_loss(
    rank: int,
    world_size: int,
    vocab: int,
    share: int,
    scale: float,
    masked: bool,
    kernel: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Loss and gradient of this rank's columns; padding holds what would win any softmax."""
    axis = mesh_for(ParallelLayout(tp=world_size), rank).tp if world_size > 1 else Axis("tp")
    logits, targets, mask = inputs(vocab, scale, masked)
    padded = F.pad(logits, (0, world_size * share - vocab), value=1e4)
    local = padded[:, axis.index * share : (axis.index + 1) * share].to(dtype).requires_grad_()
    loss = vocab_parallel_cross_entropy(
        local * 1.0, targets, mask, vocab_size=vocab, axis=axis, kernel=KERNELS[kernel]
    )
    (loss * 0.7).backward()
    return [loss.detach(), local.grad]  # type: ignore[list-item]


def check(
    workers: Workers,
    tp: int,
    *,
    vocab: int,
    share: int,
    scale: float = 3.0,
    masked: bool = True,
    kernel: str = "torch",
    dtype: torch.dtype = torch.float32,
) -> None:
    arguments = (vocab, share, scale, masked, kernel, dtype)
    results = [rank_loss(0, 1, *arguments)] if tp == 1 else workers(tp).run(rank_loss, *arguments)
    logits, targets, mask = inputs(vocab, scale, masked)
    logits = logits.to(dtype).double().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    loss = (losses * mask).sum() if mask is not None else losses.sum()
    (loss * 0.7).backward()
    assert logits.grad is not None
    expected = F.pad(logits.grad, (0, tp * share - vocab))
    for rank, (actual, grad) in enumerate(results):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), loss.detach(), rtol=2e-6, atol=1e-5)
        assert torch.equal(actual, results[0][0])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        mine = expected[:, rank * share : (rank + 1) * share]
        torch.testing.assert_close(grad.double(), mine, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_torch(workers: Workers, tp: int, masked: bool, kernel: str) -> None:
    """101 words: the last of 4 ranks with 32 columns each holds 5 words and 27 of padding."""
    share = {1: 104, 2: 56, 4: 32}[tp]
    check(workers, tp, vocab=101, share=share, masked=masked, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_of_nothing_but_padding(workers: Workers, kernel: str) -> None:
    check(workers, 4, vocab=101, share=64, kernel=kernel)


@pytest.mark.parametrize("tp", [1, 2])
def test_large_logits_neither_overflow_nor_vanish(workers: Workers, tp: int) -> None:
    check(workers, tp, vocab=50, share=56, scale=400.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_bf16_logits(workers: Workers, tp: int) -> None:
    """The loss is exact for the given logits; the gradient is rounded once."""
    check(workers, tp, vocab=101, share=104 // tp + 4, dtype=torch.bfloat16)


def test_many_rows_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megads.kernels import torch_native

    monkeypatch.setattr(torch_native, "_CHUNK_ELEMENTS", {"cpu": 300})
    check(None, 1, vocab=101, share=104)  # type: ignore[arg-type]


def test_memory_of_the_logits_is_reused() -> None:
    logits = torch.randn(6, 11)
    source = logits.clone().requires_grad_()
    buffer = source * 1.0
    loss = vocab_parallel_cross_entropy(
        buffer, torch.arange(6), None, vocab_size=11, axis=Axis("tp"), kernel=KERNELS["torch"]
    )
    seen: list[Tensor] = []
    assert buffer.grad_fn is not None
    buffer.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    loss.backward()
    assert seen[0].data_ptr() == buffer.data_ptr()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_unmasked_padding_is_seen() -> None:
    """Negative control: padding columns would change the loss if they took part."""
    logits, targets, _ = inputs(101, 3.0, masked=False)
    padded = F.pad(logits, (0, 3))
    right, wrong = (
        vocab_parallel_cross_entropy(
            padded.clone(), targets, None, vocab_size=v, axis=Axis("tp"), kernel=KERNELS["torch"]
        )
        for v in (101, 104)
    )
    torch.testing.assert_close(right, F.cross_entropy(logits, targets, reduction="sum"))
    assert abs(wrong - right) > 1e-2
