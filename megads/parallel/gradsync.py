"""The two small protocols through which gradients leave autograd.

`GradSink` is attached to a parameter as `param.grad_sink`; layers that can write a weight gradient
straight into its bucket do so through it and return no gradient to autograd. `GradSync` is all the
pipeline executor knows of data parallelism and ZeRO.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class GradSink(Protocol):
    """Where the gradient of one parameter is accumulated (a view of a flat fp32 bucket)."""

    def add(self, grad: Tensor) -> None:
        """Accumulate a gradient of the parameter's local shape."""

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Accumulate `grad_output.T @ inputs`: `[tokens, out]`, `[tokens, in]` -> `[out, in]`."""

    def add_rows(self, rows: Tensor, grad: Tensor) -> None:
        """Accumulate `grad[i]` into row `rows[i]`: int64 `[n]` and `[n, in]`; rows may repeat."""


class GradSync(Protocol):
    """Told by the executor which backward is about to run, and when it has run."""

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        """`is_last`: no later backward of `chunk` in this step; its buckets may be reduced."""

    def after_backward(self, chunk: int) -> None:
        """Every gradient that this backward of `chunk` has to give is there."""


class NoSync:
    """Gradients stay where autograd leaves them: single-process use and tests."""

    def before_backward(self, chunk: int, *, is_last: bool) -> None:
        pass

    def after_backward(self, chunk: int) -> None:
        pass


def sink_of(param: nn.Parameter | Tensor) -> GradSink | None:
    """The sink attached to `param`, if any."""
    return getattr(param, "grad_sink", None)
