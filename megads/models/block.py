"""One transformer block, pre-norm, sequential or parallel."""

from __future__ import annotations

from torch import Tensor, nn

from megads.kernels.types import AttentionPattern
from megads.models.attention import Attention
from megads.models.context import BuildContext, Pass
from megads.models.mlp import Mlp


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)): of that sum, or with `parallel_residual` of the
    block's input. Works on `[tokens, hidden]`, under sequence parallelism on a rank's share."""

    def __init__(self, layer: int, pattern: AttentionPattern, context: BuildContext) -> None:
        super().__init__()
        self._layer, self._residual = layer, context.kernels.residual
        self._parallel = context.config.parallel_residual
        self._dropout = context.config.hidden_dropout
        self._sharded = context.sequence_parallel
        self.attn_norm = context.norm(f"blocks.{layer}.attn_norm")
        self.attn = Attention(layer, pattern, context)
        self.mlp_norm = context.norm(f"blocks.{layer}.mlp_norm")
        self.mlp = Mlp(layer, context)

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        y = self._join(self.attn(self.attn_norm(x), at), x, "attn_out", at)
        return self._join(self.mlp(self.mlp_norm(x if self._parallel else y)), y, "mlp_out", at)

    def _join(self, branch: Tensor, stream: Tensor, site: str, at: Pass) -> Tensor:
        if at.dropout is None or not self._dropout:
            return self._residual(branch, stream)
        seed = at.dropout.site(self._layer, site, sharded=self._sharded)
        return self._residual(branch, stream, dropout=self._dropout, seed=seed)
