"""Attention inside of documents: every path against each document alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.kernels import reference
from megads.kernels.documents import Documents
from tests.kernels.test_backends import DTYPES, FAST, assert_same, kernels_of, patterns, randn

ROWS = ([1, 6, 2, 10], [19], [7, 12])


def starts_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """`[rows, seq]` from the lengths of each row's documents."""
    result = []
    for lengths in rows:
        sizes = torch.tensor(lengths)
        result.append((sizes.cumsum(0) - sizes).repeat_interleave(sizes))
    return torch.stack(result)


def inputs(kv: int) -> list[Tensor]:
    return [randn(19, 3, n, 10, seed=n + i) for i, n in enumerate((6, kv, kv))]


@DTYPES
@FAST
@pytest.mark.parametrize("kv", [2, 6])
@pytest.mark.parametrize("pattern", patterns(6))
def test_attention(backend: str, dtype: torch.dtype, kv: int, pattern: str) -> None:
    documents = Documents(starts_of(ROWS))
    options = {"pattern": patterns(6)[pattern], "documents": documents}
    assert_same("attention", backend, inputs(kv), dtype, **options)


@FAST
@pytest.mark.parametrize("pattern", patterns(6))
def test_each_document_is_as_if_alone(backend: str, pattern: str) -> None:
    where, op = patterns(6)[pattern], kernels_of(backend).attention
    q, k, v = inputs(2)
    packed = op(q, k, v, where, documents=Documents(starts_of(ROWS)))
    whole = op(q, k, v, where)
    for row, lengths in enumerate(ROWS):
        for piece in torch.arange(19).split(lengths):
            here = slice(int(piece[0]), int(piece[-1]) + 1), slice(row, row + 1)
            alone = reference.attention(q[here], k[here], v[here], where)
            torch.testing.assert_close(packed[here], alone, rtol=1e-4, atol=1e-5)
            if piece[0] > 0:  # negative control: the mask matters to every later document
                assert (whole[here] - alone).abs().max() > 1e-2


@pytest.mark.parametrize("pattern", patterns(6))
def test_the_mask_of_other_devices(pattern: str) -> None:
    """What the `torch` backend gives scaled_dot_product_attention where it is not on a CPU."""
    q, k, v = inputs(6)
    where, documents = patterns(6)[pattern], Documents(starts_of(ROWS))
    bias = documents.bias(where, torch.float32)
    assert bias.shape == (3, 6 if "alibi" in pattern else 1, 19, 19)
    heads = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, attn_mask=bias).permute(2, 0, 1, 3).flatten(2)
    expected = reference.attention(q, k, v, where, documents=documents)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert documents.bias(where, torch.float32) is bias
    assert [t is bias for t in documents.made] == [True]


@pytest.mark.parametrize(
    ("pattern", "dtype", "in_documents", "repeats"),
    [
        ("causal", torch.bfloat16, False, False),
        ("causal", torch.float32, False, True),
        ("causal", torch.bfloat16, True, True),
        ("window", torch.bfloat16, False, True),
        ("alibi", torch.bfloat16, False, True),
    ],
)
def test_no_kernel_of_a_gpu_is_asked_for_groups_that_it_cannot_take(
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    dtype: torch.dtype,
    in_documents: bool,
    repeats: bool,
) -> None:
    """Its flash kernel has no bias and no fp32, the other one no groups of query heads."""
    asked: list[tuple[int, bool, bool]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, **words: Any) -> Tensor:
        assert k.shape == v.shape and words["is_causal"] == (attn_mask is None)
        asked.append((k.shape[1], words["enable_gqa"], attn_mask is not None))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    q, k, v = (t.to("meta", dtype) for t in inputs(2))
    documents = Documents(starts_of(ROWS).to("meta")) if in_documents else None
    where = patterns(6)[pattern]
    out = kernels_of("torch").attention(q, k, v, where, documents=documents)
    assert out.shape == (*q.shape[:2], q.shape[2] * q.shape[3])
    has_bias = in_documents or pattern != "causal"
    assert asked == [(6 if repeats else 2, not repeats, has_bias)]
    if has_bias and not in_documents:  # one for all blocks
        assert where.relative_bias(q.shape[0], q.device, dtype) is where.made[0]


@FAST
def test_attention_takes_batch_major_memory(backend: str) -> None:
    q, k, v = (randn(3, 19, 6, 10, seed=i).transpose(0, 1) for i in range(3))
    options = {"pattern": patterns(6)["causal"], "documents": Documents(starts_of(ROWS))}
    assert_same("attention", backend, [q, k, v], **options)


@FAST
def test_dropout(backend: str) -> None:
    options = {"pattern": patterns(6)["window"], "documents": Documents(starts_of(ROWS))}
    assert_same("attention", backend, inputs(2), seed=5, dropout=0.4, **options)


def test_one_document_is_the_plain_kernel_to_the_bit() -> None:
    q, k, v = inputs(2)
    op, where = kernels_of("torch").attention, patterns(6)["alibi"]
    one = op(q, k, v, where, documents=Documents(torch.zeros(3, 19, dtype=torch.int64)))
    assert torch.equal(one, op(q, k, v, where))


def test_positions_and_pieces() -> None:
    documents = Documents(starts_of([[3, 1, 2], [6]]))
    assert documents.positions(0, 6).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert documents.positions(2, 4).tolist() == [[2, 0], [2, 3]]
    places = [(row.start, at.start, at.stop) for row, _, at in documents.pieces]
    assert places == [(0, 0, 3), (0, 3, 4), (0, 4, 6), (1, 0, 6)]
