"""One optimizer for every ZeRO stage and every place of its state: what it is told are values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from megads.config.schema import OptimConfig
from megads.optim.clip import global_norm
from megads.optim.update import Update, UpdateRule
from megads.parallel import collectives
from megads.parallel.ledger import Ledger
from megads.parallel.mesh import Mesh
from megads.parallel.pieces import TensorPiece
from megads.zero.buckets import Bucket, ShardedModule
from megads.zero.gather import ParamGatherer
from megads.zero.grads import BucketReducer, GradientBuckets
from megads.zero.memory import StateMemory, Usage, units_ahead
from megads.zero.shards import NO_OFFLOAD, Initialize, Offload, Shard, ShardMaker, shard_boxes
from megads.zero.states import MASTER, StatePiece


class ZeroOptimizer:
    """Owns parameters, gradients, fp32 master weights and optimizer state of one rank.

    Every stage updates this rank's shard of each bucket: all of it where shards have one rank
    (stage 0). Stage 1 shards optimizer state and master weights; stage 2 also the gradients, which
    are reduced in every microbatch; stage 3 also the parameters, gathered unit by unit. Without
    anybody to share with and without offload there is nothing to save, and stages 1 to 3 are 0.

    `initialize` fills a parameter with its first value; it is called bucket by bucket, so that a
    model larger than memory can be made. `updates` counts updates.
    """

    def __init__(
        self,
        modules: Sequence[ShardedModule],
        buckets: Sequence[Bucket],
        mesh: Mesh,
        rule: UpdateRule,
        config: OptimConfig,
        *,
        stage: int,
        initialize: Initialize,
        offload: Offload = NO_OFFLOAD,
    ) -> None:
        shares = mesh.shard.size > 1 or offload.kind != "none"
        self.mesh, self.stage, self.updates = mesh, stage if shares else 0, 0
        self._rule, self._config, self._offload = rule, config, offload
        maker = ShardMaker(mesh, self.stage, offload, config, self.state_kinds)
        self._shards, self._states = maker.make(buckets, initialize)
        self._moves = maker.moves
        self._ledgers = buckets[0].ledgers if buckets else (Ledger(), Ledger())
        for ledger in self._ledgers:
            ledger.restart()  # making the shards took more, bucket by bucket
        self._number = {id(bucket): n for n, bucket in enumerate(buckets)}
        self._gatherer: ParamGatherer | None = None
        if self.stage == 3:
            needs = [_buckets_by_unit(m, c, buckets) for c, m in enumerate(modules)]
            ahead = units_ahead(offload.kind, mesh.shard.size)
            self._gatherer = ParamGatherer(needs, mesh, self._fetch, ahead)
        keeps = self.stage < 2
        self.gradients = GradientBuckets(
            [
                BucketReducer(s.bucket, mesh, s.grads, moves=maker.moves, keeps=keeps)
                for s in self._shards
            ],
            mesh,
            every_backward=not keeps,
            promptly=maker.moves,
        )
        for chunk, module in enumerate(modules):
            module.unit_hooks = _ChunkHooks(chunk, self.gradients, self._gatherer)
        self._unique_grads = [
            shard.grads[start : start + box.numel]
            for shard in self._shards
            for _, box, start in shard_boxes(shard, mesh, only_owned=True)
        ]

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.gradients.reset()

    def finish_gradients(self) -> None:
        """Complete the sums over data-parallel ranks and over tied and replicated copies."""
        self.gradients.finish()

    def grad_norm(self) -> float:
        """L2 norm of the model's whole gradient, each element counted once; equal on all ranks.

        Not finite if any gradient is not. A collective call.
        """
        return global_norm(self._unique_grads, self.mesh)

    def step(self, lr: float, *, grad_divisor: float = 1.0) -> None:
        """Update the shards, then bring every rank's parameters up to date. Collective.

        Gradients are divided by `grad_divisor` (loss scale, clipping) where they are read.
        """
        self.updates += 1
        self._forget_gathered()
        gathering = []
        divisor: Tensor | None = None  # made once: on a GPU this waits for all that is under way
        for piece in self._states.stream():
            shard = self._shards[piece.shard]
            with self.mesh.phases("optimizer"):  # from a slow disk, each piece is progress
                if divisor is None and grad_divisor != 1.0:
                    divisor = torch.tensor(grad_divisor, device=piece.tensors[MASTER].device)
                for decays in (True, False):
                    self._update(shard, piece, lr, divisor, decays=decays)
                if shard.params is not None and not shard.is_master:
                    shard.params[piece.start : piece.stop].copy_(piece.tensors[MASTER])
            if piece.stop == shard.numel:
                gathering.append(self._gather(shard))
        for handle in gathering:
            handle.wait()

    def _update(
        self, shard: Shard, piece: StatePiece, lr: float, divisor: Tensor | None, *, decays: bool
    ) -> None:
        runs = [
            slice(max(s.start, piece.start), min(s.stop, piece.stop))
            for s in shard.segments
            if s.decays is decays and s.start < piece.stop and piece.start < s.stop
        ]
        if not runs:
            return
        local = [slice(r.start - piece.start, r.stop - piece.start) for r in runs]
        master = piece.tensors[MASTER]
        self._rule(
            [master[r] for r in local],
            [shard.grads[r] for r in runs],
            [[piece.tensors[name][r] for r in local] for name in self._rule.state_names],
            Update(
                self.updates,
                lr,
                self._config.weight_decay if decays else 0.0,
                divisor,
            ),
        )

    def _gather(self, shard: Shard) -> collectives.Handle:
        """From the owners to every rank of the shard axis, where parameters stay."""
        if self.stage == 3:
            return collectives.Handle()
        return collectives.all_gather_flat_async(shard.bucket.params.tensor, self.mesh.shard)

    def _fetch(self, bucket: Bucket, out: Tensor) -> Future[None] | None:
        number = self._number[id(bucket)]
        params = self._shards[number].params
        if params is None:
            return self._states.read(number, MASTER, out)
        out.copy_(params, non_blocking=True)
        return None

    def _forget_gathered(self) -> None:
        if self._gatherer is not None:
            self._gatherer.release()

    def publish(self) -> None:
        """Take the master weights as the model's weights (after loading). A collective call."""
        self._forget_gathered()
        gathering = []
        for number, shard in enumerate(self._shards):
            if shard.params is not None and not shard.is_master:
                reading = self._states.read(number, MASTER, shard.params)
                if reading is not None:
                    reading.result()
            gathering.append(self._gather(shard))
        for handle in gathering:
            handle.wait()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """`param` and the names of the optimizer's state tensors."""
        return (MASTER, *self._rule.state_names)

    def pieces(self, *, only_owned: bool, kinds: Sequence[str] = ()) -> Iterator[TensorPiece]:
        """This rank's fp32 model weights and optimizer state as slices of canonical tensors.

        Keys are "<kind>/<canonical name>". `only_owned`: over all ranks every element appears
        exactly once (saving); else all that this rank keeps (loading; call `publish` when the
        data has been written). `kinds` defaults to all of `state_kinds`.
        """
        for number, shard in enumerate(self._shards):
            for entry, box, start in shard_boxes(shard, self.mesh, only_owned=only_owned):
                spec = entry.spec
                for kind in kinds or self.state_kinds:
                    data = self._states.held(number, kind, start, start + box.numel)
                    yield TensorPiece(
                        f"{kind}/{spec.name}", data.dtype, spec.shape, box.offset, box.shape, data
                    )

    def memory(self) -> StateMemory:
        """Bytes held for the model states: of what comes and goes, the most so far."""
        parameters, gradients = (ledger.peak for ledger in self._ledgers)
        states, buffers, file = self._states.usage()
        weights = [s.params for s in self._shards if s.params is not None]
        kept = sum(t.nbytes for t in weights) if self.stage == 3 else 0
        masters = sum(4 * s.numel for s in self._shards if s.is_master and s.params is not None)
        shard = Usage(
            kept,
            sum(s.grads.nbytes for s in self._shards) if self._moves else 0,
            states - masters,
            buffers,
        )
        if self._offload.kind != "none":
            return StateMemory(Usage(parameters, gradients), shard, file)
        return StateMemory(
            Usage(parameters + kept, gradients + shard.gradients, shard.optimizer, buffers)
        )

    def close(self) -> None:
        """Remove the state file, if there is one."""
        self._states.close()


class _ChunkHooks:
    """The `UnitHooks` of one model chunk."""

    def __init__(
        self, chunk: int, gradients: GradientBuckets, gatherer: ParamGatherer | None
    ) -> None:
        self._chunk, self._gradients, self._gatherer = chunk, gradients, gatherer

    def before_forward(self, unit: str) -> None:
        if self._gatherer is not None:
            self._gatherer.before_unit(self._chunk, unit, forward=True)

    def before_backward(self, unit: str) -> None:
        self._gradients.before_unit(unit)
        if self._gatherer is not None:
            self._gatherer.before_unit(self._chunk, unit, forward=False)


def _buckets_by_unit(
    module: ShardedModule, chunk: int, buckets: Sequence[Bucket]
) -> dict[str, list[Bucket]]:
    """The buckets that hold parameters of each unit of a chunk."""
    return {
        unit: [
            bucket
            for bucket in buckets
            if any(entry.chunk == chunk and entry.name in names for entry in bucket.entries)
        ]
        for unit, names in module.units.items()
    }
