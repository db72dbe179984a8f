"""Every backend against the reference, and the reference against textbook formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.config.schema import KernelsConfig
from megads.kernels import compiled, reference
from megads.kernels.api import Kernels, select_kernels
from megads.kernels.types import AttentionPattern, dropout_mask

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def kernels_of(name: str, dtype: torch.dtype = torch.float32) -> Kernels:
    return select_kernels(KernelsConfig(name=name), CPU, dtype)[0]


def run(
    op: Callable[..., Tensor], inputs: list[Tensor], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Result, and gradients of every input for a fixed random gradient of the result."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    # Ops may work in place, which a leaf forbids.
    out = op(*[leaf * 1.0 for leaf in leaves], **options)
    source = torch.Generator().manual_seed(9)
    grad = torch.randn(out.shape, generator=source).to(out.dtype)
    return out.detach().clone(), list(torch.autograd.grad(out, leaves, grad))


def assert_same(
    op: str, backend: str, inputs: list[Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """A backend's result and gradients against the reference computed in fp32."""
    inputs = [t.to(dtype) for t in inputs]
    expected = run(getattr(reference, op), [t.float() for t in inputs], **options)
    out, grads = run(getattr(kernels_of(backend, dtype), op), inputs, **options)
    for actual, value in zip([out, *grads], [expected[0], *expected[1]], strict=True):
        assert actual.dtype == dtype
        error = (actual.float() - value).abs().max() / value.abs().max()
        assert error < TOLERANCE[dtype]


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FAST = pytest.mark.parametrize("backend", ["reference", "torch"])


@DTYPES
@FAST
@pytest.mark.parametrize("has_bias", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", [(13, 20), (7, 3, 10)])
def test_norm(backend: str, dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...]) -> None:
    x, weight, bias = randn(*shape) + 0.5, randn(shape[-1], seed=1), randn(shape[-1], seed=2)

    def call(*args: Tensor) -> Tensor:
        return (args[0], args[1], args[2] if has_bias else None, 1e-5)  # type: ignore[return-value]

    inputs = [x, weight, bias] if has_bias else [x, weight]
    op = kernels_of(backend, dtype).norm
    inputs = [t.to(dtype) for t in inputs]
    out, grads = run(lambda *a: op(*call(*a)), inputs)
    wide = [t.float() for t in inputs]
    expected = run(lambda *a: reference.norm(*call(*a)), wide)
    for actual, value in zip([out, *grads], [expected[0], *expected[1]], strict=True):
        assert actual.dtype == dtype
        assert (actual.float() - value).abs().max() / value.abs().max() < TOLERANCE[dtype]


def test_reference_norm_is_torchs() -> None:
    x, weight, bias = randn(5, 12), randn(12, seed=1), randn(12, seed=2)
    layer = F.layer_norm(x, (12,), weight, bias, 1e-3)
    torch.testing.assert_close(reference.norm(x, weight, bias, 1e-3), layer)
    rms = F.rms_norm(x, (12,), weight, 1e-3)
    torch.testing.assert_close(reference.norm(x, weight, None, 1e-3), rms)


@DTYPES
@FAST
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "swiglu", "geglu"])
def test_activation(backend: str, dtype: torch.dtype, kind: str) -> None:
    assert_same("activation", backend, [randn(11, 14, scale=2.0)], dtype, kind=kind)


@DTYPES
@FAST
@pytest.mark.parametrize(("pairs", "heads"), [(5, 3), (2, 5), (5, 5)])
def test_rotary(backend: str, dtype: torch.dtype, pairs: int, heads: int) -> None:
    """5 heads of 10 dims, all or some heads, all or some dims rotated."""
    angle = randn(13, pairs, seed=1)
    tables = {"cos": angle.cos().to(dtype).float(), "sin": angle.sin().to(dtype).float()}
    x = randn(13, 50).to(dtype)
    expected = run(reference.rotary, [x.float()], head_dim=10, heads=heads, **tables)
    narrow = {n: t.to(dtype) for n, t in tables.items()}
    actual = run(kernels_of(backend).rotary, [x], head_dim=10, heads=heads, **narrow)
    for a, b in ((actual[0], expected[0]), (actual[1][0], expected[1][0])):
        assert (a.float() - b).abs().max() / b.abs().max() < TOLERANCE[dtype]


def test_reference_rotary_is_complex_multiplication() -> None:
    angle, x = randn(6, 4, seed=1), randn(6, 16)
    out = reference.rotary(x.clone(), angle.cos(), angle.sin(), head_dim=8, heads=2)
    pairs = x.view(6, 2, 2, 4)
    turned = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(out.view(6, 2, 2, 4)[:, :, 0], turned.real)
    torch.testing.assert_close(out.view(6, 2, 2, 4)[:, :, 1], turned.imag)


def patterns(heads: int) -> dict[str, AttentionPattern]:
    slopes = [0.3 / (i + 1) for i in range(heads)]
    return {
        "causal": AttentionPattern(),
        "window": AttentionPattern(window=5),
        "wide window": AttentionPattern(window=1000),
        "alibi": AttentionPattern(slopes=slopes),
        "alibi and window": AttentionPattern(window=5, slopes=slopes),
    }


@DTYPES
@FAST
@pytest.mark.parametrize("kv", [1, 2, 6])
@pytest.mark.parametrize("pattern", patterns(6))
def test_attention(backend: str, dtype: torch.dtype, kv: int, pattern: str) -> None:
    q, k, v = (randn(19, 3, n, 10, seed=n + i) for i, n in enumerate((6, kv, kv)))
    assert_same("attention", backend, [q, k, v], dtype, pattern=patterns(6)[pattern])


@FAST
def test_attention_over_long_sequences(backend: str) -> None:
    """Blocks of keys that a window hides entirely."""
    q, k, v = (randn(700, 1, 2, 8, seed=i) for i in range(3))
    assert_same("attention", backend, [q, k, v], pattern=AttentionPattern(window=9))


@FAST
def test_attention_takes_batch_major_memory(backend: str) -> None:
    q, k, v = (randn(3, 19, 2, 10, seed=i).transpose(0, 1) for i in range(3))
    assert_same("attention", backend, [q, k, v], pattern=AttentionPattern())


@pytest.mark.parametrize("pattern", patterns(2))
def test_reference_attention_by_hand(pattern: str) -> None:
    """Against loops over queries, with the bias slope * (key - query) of the ALiBi paper."""
    where = patterns(2)[pattern]
    q, k, v = randn(9, 1, 2, 4), randn(9, 1, 1, 4, seed=1), randn(9, 1, 1, 4, seed=2)
    out = reference.attention(q, k, v, where).view(9, 2, 4)
    for i in range(9):
        for head in range(2):
            low = max(0, i + 1 - (where.window or 1000))
            slope = where.slopes[head] if where.slopes else 0.0
            scores = torch.stack(
                [q[i, 0, head] @ k[j, 0, 0] / 2.0 + slope * (j - i) for j in range(low, i + 1)]
            )
            expected = scores.softmax(0) @ v[low : i + 1, 0, 0]
            torch.testing.assert_close(out[i, head], expected, rtol=1e-4, atol=1e-5)


def test_a_wrong_window_is_seen() -> None:
    """Negative control of the comparison."""
    q, k, v = (randn(19, 1, 2, 8, seed=i) for i in range(3))
    a = reference.attention(q, k, v, AttentionPattern(window=5))
    b = reference.attention(q, k, v, AttentionPattern(window=6))
    assert (a - b).abs().max() > 1e-2


@FAST
def test_attention_dropout(backend: str) -> None:
    q, k, v = (randn(19, 2, 4, 8, seed=i) for i in range(3))
    options = {"pattern": AttentionPattern(), "dropout": 0.4}
    assert_same("attention", backend, [q, k, v], seed=5, **options)
    op = kernels_of(backend).attention
    same, other = op(q, k, v, seed=5, **options), op(q, k, v, seed=6, **options)
    assert torch.equal(same, op(q, k, v, seed=5, **options))
    assert not torch.equal(same, other)


@DTYPES
@FAST
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_residual(backend: str, dtype: torch.dtype, dropout: float) -> None:
    inputs = [randn(11, 8), randn(11, 8, seed=1)]
    assert_same("residual", backend, inputs, dtype, dropout=dropout, seed=4)


def test_dropout_keeps_the_mean() -> None:
    kept = dropout_mask((400, 500), 0.3, 1, CPU)
    assert abs(kept.float().mean().item() - 0.7) < 5 * math.sqrt(0.21 / 200000)
    out = kernels_of("torch").residual(torch.ones(400, 500), None, dropout=0.3, seed=1)
    assert torch.equal(out, kept / 0.7)


@DTYPES
@FAST
@pytest.mark.parametrize("valid", [0, 1, 40, 64])
def test_cross_entropy_halves(backend: str, dtype: torch.dtype, valid: int) -> None:
    op = kernels_of(backend).cross_entropy
    logits = (randn(17, 64, scale=4.0) - 300.0).to(dtype)
    targets = torch.arange(17) * 3 % max(valid, 1) if valid else torch.full((17,), -1)
    targets[::4] = -1
    buffer = logits.clone()
    stats = op.exponentiate_(buffer, targets, valid)
    wide = logits[:, :valid].double()
    maximum = wide.amax(1) if valid else torch.full((17,), -math.inf, dtype=torch.float64)
    powers = torch.exp(wide - maximum[:, None])
    torch.testing.assert_close(stats.maximum.double(), maximum)
    torch.testing.assert_close(stats.total.double(), powers.sum(1), rtol=1e-5, atol=0)
    here = targets >= 0
    assert torch.equal(stats.target[here], logits[here, targets[here]].float())
    assert not stats.target[~here].any() and not buffer[:, valid:].any()
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(buffer[:, :valid].double(), powers, rtol=tolerance, atol=1e-30)
    factor, at_target = randn(17, seed=3), randn(17, seed=4)
    grad = op.gradient_(buffer, factor, targets, at_target)
    assert grad.data_ptr() == buffer.data_ptr()
    expected = torch.zeros(17, 64, dtype=torch.float64)
    expected[:, :valid] = powers * factor[:, None].double()
    expected[here, targets[here]] = at_target[here].double()
    torch.testing.assert_close(grad.double(), expected, rtol=2 * tolerance, atol=1e-30)


@FAST
@pytest.mark.parametrize("scale", [None, 3.0])
def test_adamw_is_torch_optims(backend: str, scale: float | None) -> None:
    params = [randn(n, seed=n) for n in (7, 1, 130)]
    ours = [p.clone() for p in params]
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    other = torch.optim.AdamW(theirs, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(1, 4):
        grads = [randn(len(p), seed=10 * step + i) for i, p in enumerate(params)]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        other.step()
        kernels_of(backend).adamw(
            ours,
            [g * (scale or 1.0) for g in grads],
            exp_avgs,
            exp_avg_sqs,
            step=step,
            lr=0.02,
            beta1=0.8,
            beta2=0.9,
            eps=1e-6,
            weight_decay=0.3,
            grad_scale=None if scale is None else torch.tensor(scale),
        )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.data, rtol=1e-5, atol=1e-6)


def test_compiled() -> None:
    """One call of each op that the backend has; compiling is slow."""
    if reason := compiled.why_unavailable(CPU, torch.float32):
        pytest.skip(reason)
    assert_same("activation", "compiled", [randn(11, 14)], kind="swiglu")
    assert_same("residual", "compiled", [randn(11, 8), randn(11, 8, seed=1)])
    angle = randn(13, 5, seed=1)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    assert_same("rotary", "compiled", [randn(13, 50)], head_dim=10, heads=3, **tables)
    norm = [randn(13, 20), randn(20, seed=1), randn(20, seed=2)]
    assert_same("norm", "compiled", norm, eps=1e-5)
