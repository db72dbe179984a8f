"""What the modules of a stage share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from megads.config.model import ModelConfig
from megads.kernels.api import Kernels
from megads.kernels.documents import Documents
from megads.models.tokens import TokenGrid
from megads.parallel.mesh import Axis
from megads.parallel.rng import DropoutKey
from megads.parallel.sharding import ParamSpec
from megads.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    new_parameter,
)


@dataclass(frozen=True)
class BuildContext:
    """How to make the modules of a stage: its specs by canonical name, and where they live."""

    config: ModelConfig
    specs: Mapping[str, ParamSpec]
    tp: Axis
    kernels: Kernels
    sequence_parallel: bool
    recompute: str
    dtype: torch.dtype
    device: torch.device | str

    def parameter(self, name: str) -> nn.Parameter:
        return new_parameter(self.specs[name], self.tp, dtype=self.dtype, device=self.device)

    def norm(self, name: str) -> Norm:
        return Norm(name, self)

    def column(self, name: str) -> ColumnParallelLinear:
        return ColumnParallelLinear(*self._linear(name), **self._how())

    def row(self, name: str) -> RowParallelLinear:
        return RowParallelLinear(*self._linear(name), **self._how())

    def embedding(self, name: str) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(self.specs[f"{name}.weight"], self.tp, **self._how())

    def _linear(self, name: str) -> tuple[ParamSpec, ParamSpec | None, Axis]:
        return self.specs[f"{name}.weight"], self.specs.get(f"{name}.bias"), self.tp

    def _how(self) -> dict[str, Any]:
        return {
            "sequence_parallel": self.sequence_parallel,
            "dtype": self.dtype,
            "device": self.device,
        }


class Norm(nn.Module):
    """LayerNorm or RMSNorm, whichever parameters the specs have under `name`."""

    bias: nn.Parameter | None

    def __init__(self, name: str, context: BuildContext) -> None:
        super().__init__()
        self._norm, self._eps = context.kernels.norm, context.config.norm_eps
        self.weight = context.parameter(f"{name}.weight")
        has_bias = f"{name}.bias" in context.specs
        self.bias = context.parameter(f"{name}.bias") if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self._eps)


@dataclass(frozen=True)
class Pass:
    """What one forward pass of a stage brings to its blocks.

    `rotary`: (cos, sin) per token. `documents`: None when attention and positions go on across
    their ends. `dropout`: None when nothing is dropped; blocks take it as an
    argument so that one recomputed during backward, when other microbatches have been through the
    stage, draws what it drew before.
    """

    grid: TokenGrid
    rotary: tuple[Tensor, Tensor] | None
    documents: Documents | None
    dropout: DropoutKey | None

    def shared(self) -> Iterable[Tensor]:
        """What all blocks read."""
        made = self.documents.made if self.documents is not None else ()
        return (*(self.rotary or ()), *made)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call `function`, keep only its arguments, and call it again during backward."""
    result: Tensor = torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False
    )
    return result
