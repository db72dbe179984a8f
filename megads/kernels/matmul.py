"""Matrix products in narrow types, on CPUs without instructions for them through fp32.

There torch multiplies bf16 and fp16 matrices with scalar loops: on an AVX2 machine 3 to 40 times
slower than converting both sides, multiplying in fp32 and rounding the result once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has no fast product of `dtype`."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return False


@functools.cache
def _gives_fp32(device: str, dtype: torch.dtype) -> bool:
    """Whether the product of two matrices of `dtype` can be had in fp32 there."""
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(factor, factor, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two matrices, in their dtype."""
    if a.device.type == "cpu" and _is_slow(a.dtype):
        return torch.mm(a.float(), b.float()).to(a.dtype)
    return torch.mm(a, b)


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`bias + a @ b`, in their dtype."""
    if a.device.type == "cpu" and _is_slow(a.dtype):
        return torch.addmm(bias.float(), a.float(), b.float()).to(a.dtype)
    return torch.addmm(bias, a, b)


def accumulate_product(out: Tensor, a: Tensor, b: Tensor, *, overwrite: bool) -> None:
    """`out += a @ b` in place, or `out = a @ b`; an fp32 `out` of narrow factors is common.

    Where the product runs in fp32 it goes straight into `out`: no temporary of its size, no
    rounding to the narrow type, no addition afterwards. A GPU's narrow product is asked for in
    fp32, in which it is summed up anyway.
    """
    if a.dtype != out.dtype and a.device.type == "cpu" and _is_slow(a.dtype):
        a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=0 if overwrite else 1, out=out)
        return
    gives = out.dtype == torch.float32 and _gives_fp32(a.device.type, a.dtype)
    product = torch.mm(a, b, out_dtype=torch.float32) if gives else torch.mm(a, b)
    if overwrite:
        out.copy_(product)
    else:
        out.add_(product)
