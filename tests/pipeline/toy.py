"""A small language model written for these tests, whole and cut into stages.

Attention-free and unlike the package's own models: what is tested is the pipeline around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.config.model import ModelConfig
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from megads.pipeline.executor import PipelineExecutor
from megads.pipeline.partition import ChunkPlan, StagePlan, plan_stages
from tests.distributed import mesh_for

VOCAB, HIDDEN = 37, 12


class Layer(nn.Module):
    """Mixes neighbouring positions, so that a microbatch must arrive whole and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        before = F.pad(hidden, (0, 0, 0, 0, 1, 0))[:-1]
        return hidden + torch.tanh(self.inner(hidden) + self.gain * before)


class Whole(nn.Module):
    """The dense oracle: embedding, layers, head; called with a microbatch it gives the loss sum."""

    def __init__(self, layers: int, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden = self.embedding(batch.tokens.t())
        for layer in self.layers:
            hidden = layer(hidden)
        return self.loss(hidden, batch)

    def loss(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        logits = self.head(hidden).transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        return losses.sum() if batch.loss_mask is None else losses @ batch.loss_mask.flatten()


class Piece(nn.Module):
    """One virtual stage of a `Whole`; shares its parameters and their names."""

    def __init__(self, whole: Whole, plan: ChunkPlan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in plan.layers})
        if plan.has_embedding:
            self.embedding = whole.embedding
        if plan.has_head:
            self.head = whole.head

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        if self.plan.has_embedding:
            assert hidden is None
            hidden = self.embedding(batch.tokens.t())
        assert hidden is not None
        for layer in self.layers.values():
            hidden = layer(hidden)
        return Whole.loss(self, hidden, batch) if self.plan.has_head else hidden  # type: ignore[arg-type]


def activation_shape(batch: MicroBatch) -> tuple[int, ...]:
    return (batch.tokens.shape[1], batch.tokens.shape[0], HIDDEN)


def make_batches(sizes: Sequence[int], seq: int = 7, seed: int = 1) -> list[MicroBatch]:
    """Random microbatches of the given batch sizes; every other one has a loss mask."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index, size in enumerate(sizes):
        tokens = torch.randint(VOCAB, (size, seq + 1), generator=generator)
        mask = (torch.rand(size, seq, generator=generator) < 0.6).float() if index % 2 else None
        batches.append(MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:], mask, index))
    return batches


def named_grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def plan_for(layers: int, pp: int, chunks: int, split: Sequence[int] | None = None) -> StagePlan:
    config = ModelConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=2, vocab_size=VOCAB
    )
    return plan_stages(config, pp, chunks, 7, split)


def executor_for(
    whole: Whole, plan: StagePlan, schedule: str, mesh: Mesh, **more: Callable[..., None]
) -> PipelineExecutor:
    pieces = [Piece(whole, chunk) for chunk in plan.chunks_of(mesh.pp.index)]
    return PipelineExecutor(
        pieces,
        plan,
        schedule,
        mesh,
        activation_shape=activation_shape,
        dtype=torch.float32,
        **more,
    )


def mesh_of(rank: int, pp: int) -> Mesh:
    return Mesh.single() if pp == 1 else mesh_for(ParallelLayout(pp=pp), rank)
