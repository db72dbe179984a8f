"""Products in narrow types are within one rounding of the exact ones, whichever way they go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.kernels import matmul


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slow: bool) -> None:
    monkeypatch.setattr(matmul, "_is_slow", lambda dtype: slow)
    source = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(s, generator=source).to(dtype) for s in ((9, 30), (30, 7), (7,)))
    exact = a.double() @ b.double()
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    for actual, expected in (
        (matmul.mm(a, b), exact),
        (matmul.addmm(bias, a, b), exact + bias.double()),
        (matmul.mm(b.t(), a.t()), exact.t()),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overwrite", [True, False])
def test_products_accumulate_in_fp32(dtype: torch.dtype, overwrite: bool) -> None:
    a, b = torch.randn(7, 33).to(dtype), torch.randn(33, 5).to(dtype)
    start = torch.full((7, 5), float("nan")) if overwrite else torch.randn(7, 5)
    out = start.clone()
    matmul.accumulate_product(out, a, b, overwrite=overwrite)
    exact = a.double() @ b.double() + (0 if overwrite else start.double())
    error = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=error)


def test_a_narrow_product_in_fp32_is_not_rounded_before_it_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As GPUs give it; a CPU does not, so that its part is played here."""
    plain, asked = torch.mm, []

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        asked.append(out_dtype)
        return plain(a, b) if out_dtype is None else plain(a.to(out_dtype), b.to(out_dtype))

    a, b = torch.randn(7, 33).bfloat16(), torch.randn(33, 5).bfloat16()
    exact = a.double() @ b.double()
    monkeypatch.setattr(matmul, "_is_slow", lambda dtype: False)
    errors = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(torch, "mm", mm)
        matmul._gives_fp32.cache_clear()
        out = torch.zeros(7, 5)
        matmul.accumulate_product(out, a, b, overwrite=False)
        errors.append(float((out.double() - exact).abs().max()))
    matmul._gives_fp32.cache_clear()
    assert asked == [torch.float32] * 2 and errors[0] > 1e-3 > 1e-5 > errors[1]
