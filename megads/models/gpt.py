"""The part of a GPT that one pipeline chunk holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.config.model import ModelConfig
from megads.kernels.api import Kernels
from megads.kernels.documents import Documents
from megads.kernels.types import AttentionPattern
from megads.models.block import Block
from megads.models.context import BuildContext, Pass, recomputed
from megads.models.families import HEAD
from megads.models.positions import RotaryTable, alibi_slopes
from megads.models.saved import SavedTensors
from megads.models.stage import EMBEDDING_UNIT, HEAD_UNIT, Chunk, stage_specs, stage_units
from megads.models.tokens import TokenGrid
from megads.parallel.batch import MicroBatch
from megads.parallel.collectives import all_gather_dim0
from megads.parallel.mesh import Axis, Mesh
from megads.parallel.rng import DropoutRng
from megads.parallel.units import UnitHooks, after_unit, before_unit
from megads.tensor_parallel.layers import VocabParallelEmbedding, column_parallel
from megads.tensor_parallel.loss import vocab_parallel_cross_entropy

Recompute = Literal["none", "selective", "full"]
EMBEDDING_LAYER = -1
"""Stands for the embedding where dropout sites are told apart by layer."""


class GPTStage(nn.Module):
    """Embedding, blocks, final norm and head, as far as `plan` puts them here.

    Module names are the canonical ones with global layer indices. A head tied to an embedding on
    the same stage is that embedding's Parameter; on another stage it is `head.weight` here, with
    the embedding's spec.

    `specs`: the ParamSpec of every name in `named_parameters()`.
    `dropout_rng`: to be seeded before each forward pass when anything is dropped.
    `recompute_layers`: with recompute "full", how many blocks, the first ones (None: all).
    `saved`: who sees what is kept for backward passes, the same for all chunks of a rank.
    `units`: names of the parameters that each unit reads, in forward order.
    `unit_hooks`: who is told before a unit is computed, if anyone.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Chunk,
        mesh: Mesh,
        kernels: Kernels,
        *,
        sequence_parallel: bool,
        recompute: str,
        recompute_layers: int | None = None,
        saved: SavedTensors | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.plan, self._tp, self._kernels = config, plan, mesh.tp, kernels
        self._sequence_parallel = sequence_parallel and mesh.tp.size > 1
        all_or_some = len(plan.layers) if recompute_layers is None else recompute_layers
        self._recomputed_blocks = all_or_some if recompute == "full" else 0
        self.specs = stage_specs(config, plan)
        self.dropout_rng = DropoutRng(mesh.tp.index)
        self._saved = saved or SavedTensors()
        self._rotary = RotaryTable(config) if config.position == "rope" else None
        context = BuildContext(
            config,
            self.specs,
            mesh.tp,
            kernels,
            self._sequence_parallel,
            recompute,
            dtype,
            device,
        )
        self.embedding = Embedding(context) if plan.has_embedding else None
        self._pattern = attention_pattern(config, mesh.tp)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(layer, self._pattern, context) for layer in plan.layers}
        )
        self.final_norm = context.norm("final_norm") if plan.has_head else None
        self.head: VocabParallelEmbedding | None = None
        if plan.has_head and HEAD in self.specs:
            self.head = context.embedding("head")
        self.units = stage_units(self.specs, plan)
        self.unit_hooks: UnitHooks | None = None

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run the chunk on a microbatch.

        `hidden`: `[tokens, hidden]` (`[tokens / tp, ...]` under sequence parallelism) from the
        chunk before, in the order of TokenGrid; ignored by the first. Returns the same from a chunk
        without the head; with it the fp32 sum over tokens of loss_mask x cross entropy, the same on
        all tp ranks.
        """
        with self._saved.of_pass(self.parameters(), self._tables):
            return self._forward(hidden, batch)

    def _forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        x, grid = self._run(hidden, batch)
        if self.final_norm is None:
            return x
        mask = batch.loss_mask
        loss = vocab_parallel_cross_entropy(
            self._local_logits(x),
            grid.flatten_ids(batch.labels),
            grid.flatten_ids(mask) if mask is not None else None,
            vocab_size=self.config.vocab_size,
            axis=self._tp,
            kernel=self._kernels.cross_entropy,
        )
        after_unit(HEAD_UNIT, loss, self.unit_hooks)
        return loss

    def logits(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """Logits of a chunk with the head, `[batch, seq, vocab_size]` on every tp rank; no
        gradient flows through the gathering. `batch.labels` is not read."""
        x, grid = self._run(hidden, batch)
        local = self._local_logits(x)
        if self._tp.size > 1:
            shares = all_gather_dim0(local.detach()[None], self._tp)
            local = shares.transpose(0, 1).flatten(1)
        logits = grid.unflatten(local[:, : self.config.vocab_size].contiguous())
        return logits.transpose(0, 1)

    def _run(self, hidden: Tensor | None, batch: MicroBatch) -> tuple[Tensor, TokenGrid]:
        count, seq = batch.tokens.shape
        grid = TokenGrid(seq, count, batch_first=not self._sequence_parallel)
        at = self._pass(grid, batch)
        hooks = self.unit_hooks
        if self.embedding is not None:
            before_unit(EMBEDDING_UNIT, hooks)
            x = self.embedding(grid.flatten_ids(batch.tokens), at)
            after_unit(EMBEDDING_UNIT, x, hooks)
        elif hidden is None:
            raise ValueError("a chunk without the embedding needs hidden states")
        else:
            x = hidden
        recomputes = self.training and torch.is_grad_enabled()
        with self._saved.of_blocks(self.parameters(), self._tables, at.shared):
            for number, (layer, block) in enumerate(self.blocks.items()):
                before_unit(f"blocks.{layer}", hooks)
                if recomputes and number < self._recomputed_blocks:
                    x = recomputed(block, x, at)
                else:
                    x = block(x, at)
                after_unit(f"blocks.{layer}", x, hooks)
        if self.final_norm is not None:
            before_unit(HEAD_UNIT, hooks)
        return x, grid

    def _pass(self, grid: TokenGrid, batch: MicroBatch) -> Pass:
        config, starts = self.config, batch.document_starts
        documents = Documents(starts) if starts is not None else None
        drops = self.training and (config.hidden_dropout > 0 or config.attention_dropout > 0)
        rotary = None
        if self._rotary is not None and self.blocks:
            parameter = next(self.parameters())
            tables = self._rotary(grid.seq, dtype=parameter.dtype, device=parameter.device)
            if documents is None:
                rotary = (grid.repeat(tables[0]), grid.repeat(tables[1]))
            else:
                rows = grid.flatten_ids(documents.positions(0, grid.seq))
                rotary = (tables[0][rows], tables[1][rows])
        return Pass(grid, rotary, documents, self.dropout_rng.key if drops else None)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables made so far: rotary cosines and sines, attention biases."""
        return sum(table.untyped_storage().nbytes() for table in self._tables())

    def _tables(self) -> Iterator[Tensor]:
        yield from self._pattern.made
        if self._rotary is not None:
            yield from self._rotary.made

    def _local_logits(self, x: Tensor) -> Tensor:
        """This rank's columns `[tokens, padded_vocab / tp]`, of the whole sequence."""
        if self.final_norm is None:
            raise ValueError("only a chunk with the head has logits")
        holder = self.head if self.head is not None else self.embedding.word  # type: ignore[union-attr]
        return column_parallel(
            self.final_norm(x),
            holder.weight,
            None,
            self._tp,
            sequence_parallel=self._sequence_parallel,
        )


class Embedding(nn.Module):
    """Word embedding, learned positions and embedding norm, as the family has them."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        config = context.config
        self._sequence_parallel = context.sequence_parallel
        self._residual, self._dropout = context.kernels.residual, config.hidden_dropout
        self.word = context.embedding("embedding.word")
        learned = config.position == "learned"
        self.position = PositionTable(context) if learned else None
        self.norm = context.norm("embedding.norm") if config.embedding_norm else None

    def forward(self, ids: Tensor, at: Pass) -> Tensor:
        """`ids` `[tokens]` -> `[tokens, hidden]`, or this rank's `[tokens / tp, hidden]`."""
        x: Tensor = self.word(ids)
        if self.position is not None:
            x = self.position(x, at)
        if self.norm is not None:
            x = self.norm(x)
        if at.dropout is not None and self._dropout:
            seed = at.dropout.site(EMBEDDING_LAYER, "embedding", sharded=self._sequence_parallel)
            x = self._residual(x, None, dropout=self._dropout, seed=seed)
        return x


class PositionTable(nn.Module):
    """Learned positions, in the sequence or in the document."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self._tp, self._sequence_parallel = context.tp, context.sequence_parallel
        self.weight = context.parameter("embedding.position.weight")

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        """`x`, this rank's tokens `[tokens, hidden]`, each plus the row of its position."""
        grid, seq = at.grid, at.grid.seq
        if seq > len(self.weight):
            raise ValueError(f"{seq} positions were given to a model that has {len(self.weight)}")
        first, share = 0, seq
        if self._sequence_parallel:
            share = seq // self._tp.size
            first = self._tp.index * share
        if at.documents is None:
            return grid.add_positions(x, self.weight[first : first + share])
        positions = at.documents.positions(first, first + share)
        return x + F.embedding(grid.flatten_ids(positions), self.weight)


def attention_pattern(config: ModelConfig, tp: Axis) -> AttentionPattern:
    """The pattern of this rank's heads."""
    slopes = None
    if config.position == "alibi":
        share = config.num_attention_heads // tp.size
        every = alibi_slopes(config.num_attention_heads)
        slopes = every[tp.index * share : (tp.index + 1) * share]
    return AttentionPattern(config.attention_window, slopes)
