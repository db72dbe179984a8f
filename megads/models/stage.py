"""Which parameters a chunk of the model holds, and which unit of it reads which. Pure: no torch."""

from __future__ import annotations

from typing import Protocol

from megads.config.model import ModelConfig
from megads.models.families import HEAD, WORD_EMBEDDING, param_specs
from megads.parallel.sharding import ParamSpec

EMBEDDING_UNIT, HEAD_UNIT = "embedding", "head"


class Chunk(Protocol):
    """What a stage needs to know of its place in the pipeline."""

    @property
    def layers(self) -> range: ...
    @property
    def has_embedding(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...


def stage_specs(config: ModelConfig, plan: Chunk) -> dict[str, ParamSpec]:
    """Specs of the parameters of a chunk, by their name in its GPTStage, in model order."""
    specs: dict[str, ParamSpec] = {}
    for spec in param_specs(config):
        here = spec.layer in plan.layers if spec.layer is not None else False
        at_edge = {"first": plan.has_embedding, "last": plan.has_head}
        if here or (spec.edge is not None and at_edge[spec.edge]):
            specs[spec.name] = spec
    if config.tie_embeddings and plan.has_head and not plan.has_embedding:
        (tied,) = (spec for spec in param_specs(config) if spec.name == WORD_EMBEDDING)
        specs[HEAD] = tied
    return specs


def stage_units(specs: dict[str, ParamSpec], plan: Chunk) -> dict[str, tuple[str, ...]]:
    """The units of a chunk in forward order, each with the parameters that it reads."""
    units: dict[str, tuple[str, ...]] = {}
    if plan.has_embedding:
        units[EMBEDDING_UNIT] = tuple(name for name in specs if name.startswith("embedding."))
    for layer in plan.layers:
        prefix = f"blocks.{layer}"
        units[prefix] = tuple(name for name in specs if name.startswith(f"{prefix}."))
    if plan.has_head:
        weight = HEAD if HEAD in specs else WORD_EMBEDDING
        norm = (name for name in specs if name.startswith("final_norm."))
        units[HEAD_UNIT] = (*norm, weight)
    return units
