"""Which layers each pipeline stage holds, balanced by estimated cost. Pure: no torch.

A stage holds `chunks` pieces of the model, its virtual stages: virtual stage `chunk * pp + stage`,
counted in model order, lies on `stage`. The first holds the embedding, the last the final norm, the
head and the loss. Costs are forward floating-point operations per token; a backward pass is taken
as proportional, so only the ratios matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megads.config.model import ModelConfig
from megads.config.stages import stage_problems
from megads.errors import LayoutError

ELEMENT_FLOPS = 16
"""What reading and writing one element costs, in matrix-multiply operations of the same time.

Pointwise work is bound by memory. The ratio is a few tens on CPU cores and higher on GPUs with
unfused kernels, lower with fused ones; splits depend on it weakly.
"""


@dataclass(frozen=True)
class ChunkPlan:
    """One virtual stage: global indices of its blocks, and which ends of the model it holds."""

    stage: int
    chunk: int
    virtual_stage: int
    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class StagePlan:
    """The whole split; `assignments` lists the virtual stages in model order."""

    num_stages: int
    chunks: int
    assignments: tuple[ChunkPlan, ...]

    def chunks_of(self, stage: int) -> tuple[ChunkPlan, ...]:
        """The chunks that `stage` holds, in chunk order."""
        return self.assignments[stage :: self.num_stages]

    @property
    def split(self) -> tuple[int, ...]:
        """Layers per virtual stage in model order."""
        return tuple(len(chunk.layers) for chunk in self.assignments)


@dataclass(frozen=True)
class ModelCost:
    """Estimated cost per token of the parts of a model, in forward floating-point operations."""

    block: int
    embedding: int
    head: int

    def of(self, layers: int, *, has_embedding: bool, has_head: bool) -> int:
        """Cost of a piece of the model."""
        return self.block * layers + self.embedding * has_embedding + self.head * has_head


def estimate_cost(config: ModelConfig, seq_length: int) -> ModelCost:
    """Forward cost per token of a block, of the embedding, and of the head with the loss.

    A multiplication by an `[m, n]` matrix is 2mn operations. Attention scores and their product
    with the values count every key in reach (all of the sequence, or the window): causal kernels
    skip about half of them and are about half as efficient as plain matrix products.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query = config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    keys = min(seq_length, config.attention_window or seq_length)
    projections = hidden * (query + key_value) + query * hidden
    up = 2 * ffn if config.gated else ffn
    mlp = hidden * up + ffn * hidden
    # Per token: two norms, two residual sums (read twice, written once), the activation, rotation.
    elements = 10 * hidden + 2 * up + 2 * (query + key_value)
    return ModelCost(
        block=2 * (projections + mlp) + 4 * query * keys + ELEMENT_FLOPS * elements,
        embedding=ELEMENT_FLOPS * 2 * hidden,
        # The loss passes over the logits about three times: maximum, exponentials, pick.
        head=2 * hidden * config.vocab_size + ELEMENT_FLOPS * (3 * config.vocab_size + 2 * hidden),
    )


def plan_stages(
    config: ModelConfig,
    pp: int,
    chunks: int,
    seq_length: int,
    split: Sequence[int] | None = None,
) -> StagePlan:
    """Cut the model into `pp * chunks` contiguous virtual stages.

    `split` gives the layers of each virtual stage in model order; only its first and last may be
    zero (nothing but the embedding, nothing but the head). Without it the slowest stage, summed
    over its chunks, is made as fast as possible, then the next slowest, and so on; within a stage
    likewise over its chunks. Every virtual stage then has a layer. Among equals, later stages and
    chunks get the extra layer: earlier ones hold more microbatches in flight.

    Raises LayoutError if the layers cannot be cut that way.
    """
    problems = list(stage_problems(config.num_layers, pp, chunks, split))
    if problems:
        raise LayoutError(problems)
    if split is None:
        split = _balanced_split(config.num_layers, estimate_cost(config, seq_length), pp, chunks)
    assignments, start = [], 0
    for virtual, size in enumerate(split):
        assignments.append(
            ChunkPlan(
                stage=virtual % pp,
                chunk=virtual // pp,
                virtual_stage=virtual,
                layers=range(start, start + size),
                has_embedding=virtual == 0,
                has_head=virtual == len(split) - 1,
            )
        )
        start += size
    return StagePlan(pp, chunks, tuple(assignments))


def virtual_stage_costs(config: ModelConfig, plan: StagePlan, seq_length: int) -> tuple[int, ...]:
    """Estimated forward cost per token of each virtual stage, in model order."""
    cost = estimate_cost(config, seq_length)
    return tuple(
        cost.of(len(c.layers), has_embedding=c.has_embedding, has_head=c.has_head)
        for c in plan.assignments
    )


def _balanced_split(num_layers: int, cost: ModelCost, pp: int, chunks: int) -> tuple[int, ...]:
    first, last = 0, pp - 1
    fixed = [cost.embedding * (s == first) + cost.head * (s == last) for s in range(pp)]
    per_stage = _fill(num_layers, cost.block, fixed, at_least=chunks)
    sizes = [0] * (pp * chunks)
    for stage, layers in enumerate(per_stage):
        fixed = [0] * chunks
        fixed[0] += cost.embedding * (stage == first)
        fixed[-1] += cost.head * (stage == last)
        sizes[stage::pp] = _fill(layers, cost.block, fixed, at_least=1)
    return tuple(sizes)


def _fill(items: int, item_cost: int, fixed: Sequence[int], at_least: int) -> list[int]:
    """Spread equal items over bins with fixed costs so that the largest total is smallest.

    Each item in turn goes where the total stays lowest, which is optimal for equal items; the last
    of equal bins wins.
    """
    counts = [at_least] * len(fixed)
    for _ in range(items - at_least * len(fixed)):
        target = min(range(len(fixed)), key=lambda i: (fixed[i] + counts[i] * item_cost, -i))
        counts[target] += 1
    return counts
