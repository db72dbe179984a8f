"""Multi-head self-attention with grouped KV heads, split by heads over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn

from megads.kernels.types import AttentionPattern
from megads.models.context import BuildContext, Pass, recomputed


class Attention(nn.Module):
    """`[tokens, hidden]` -> `[tokens, hidden]`; a rank works on its heads alone.

    The rows of `qkv` are `[q heads; k heads; v heads]` of this rank. With fewer KV heads than
    ranks, neighbouring ranks hold copies of one KV head, and each gets its own query heads' part
    of that head's gradient.
    """

    def __init__(self, layer: int, pattern: AttentionPattern, context: BuildContext) -> None:
        super().__init__()
        config = context.config
        prefix = f"blocks.{layer}.attn"
        self._layer, self._pattern, self._kernels = layer, pattern, context.kernels
        self._head_dim, self._eps = config.head_dim, config.norm_eps
        self._dropout = config.attention_dropout
        self._recompute = context.recompute == "selective"
        q, k, v = (
            slab.length // config.head_dim
            for slab in context.specs[f"{prefix}.qkv.weight"].slabs(context.tp.size, 0)
        )
        self._heads = (q, k, v)
        self.qkv = context.column(f"{prefix}.qkv")
        self.q_norm = context.norm(f"{prefix}.q_norm") if config.qk_norm else None
        self.k_norm = context.norm(f"{prefix}.k_norm") if config.qk_norm else None
        self.out = context.row(f"{prefix}.out")

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        q, k, v = self._project(x, at)
        grid, dropout, seed = at.grid, 0.0, 0
        if at.dropout is not None and self._dropout:
            dropout = self._dropout
            seed = at.dropout.site(self._layer, "attention", sharded=True)

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._kernels.attention(
                q, k, v, self._pattern, documents=at.documents, dropout=dropout, seed=seed
            )

        heads = (grid.unflatten(q), grid.unflatten(k), grid.unflatten(v))
        if self._recompute and self.training:
            mixed = recomputed(core, *heads)
        else:
            mixed = core(*heads)
        result: Tensor = self.out(grid.flatten(mixed))
        return result

    def _project(self, x: Tensor, at: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[tokens, heads, head_dim]`, normalized and rotated."""
        count_q, count_k, _ = self._heads
        qkv = self.qkv(x)
        if at.rotary is not None and self.q_norm is None:
            qkv = self._rotate(qkv, count_q + count_k, at)
        q, k, v = qkv.view(len(qkv), -1, self._head_dim).split(self._heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            if at.rotary is not None:
                q, k = self._rotate(q, count_q, at), self._rotate(k, count_k, at)
        return q, k, v

    def _rotate(self, x: Tensor, heads: int, at: Pass) -> Tensor:
        assert at.rotary is not None
        cos, sin = at.rotary
        return self._kernels.rotary(x, cos, sin, head_dim=self._head_dim, heads=heads)
