"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from megads.models.context import BuildContext


class Mlp(nn.Module):
    """`[tokens, hidden]` -> `[tokens, hidden]`; rows of `up` are `[gate; up]` in gated families."""

    def __init__(self, layer: int, context: BuildContext) -> None:
        super().__init__()
        prefix = f"blocks.{layer}.mlp"
        self._activation, self._kind = context.kernels.activation, context.config.activation
        self.up = context.column(f"{prefix}.up")
        self.down = context.row(f"{prefix}.down")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self._activation(self.up(x), self._kind))
        return result
