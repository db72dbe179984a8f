"""Products in narrow types are within one rounding of the exact ones, whichever way they go."""

from __future__ import annotations

import pytest
import torch

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
