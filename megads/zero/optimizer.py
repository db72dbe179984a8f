"""One optimizer for every ZeRO stage: the stage decides which range of each bucket is updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megads.config.schema import OptimConfig
from megads.optim.clip import global_norm
from megads.optim.update import UpdateRule
from megads.parallel import collectives
from megads.parallel.mesh import Mesh
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import Box, flat_range_boxes
from megads.zero.buckets import Bucket, Entry
from megads.zero.grads import GradientBuckets


class _Segment(NamedTuple):
    """A run of a bucket's updated range that shares one weight decay."""

    start: int
    stop: int
    decays: bool


@dataclass
class _Shard:
    """The range [start, stop) of a bucket that this rank updates, and its fp32 state.

    `master` shares memory with the parameters when those are fp32.
    """

    bucket: Bucket
    start: int
    stop: int
    master: Tensor
    states: tuple[Tensor, ...]
    segments: tuple[_Segment, ...]

    def flat(self, kind: str, names: Sequence[str]) -> Tensor:
        return self.master if kind == "param" else self.states[names.index(kind)]


class ZeroOptimizer:
    """Owns gradients, fp32 master weights and optimizer state of one rank's parameters.

    Stage 0 updates whole buckets on every data-parallel rank; stage 1 updates the owned chunk and
    gathers the parameters afterwards (Rajbhandari et al., 2020). Norms and checkpoints always use
    the owned chunk, so that every element of the model counts once, whatever the stage.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        rule: UpdateRule,
        config: OptimConfig,
        *,
        stage: int,
    ) -> None:
        self.mesh, self.stage, self.updates = mesh, stage, 0
        self._rule, self._config = rule, config
        self.gradients = GradientBuckets(buckets, mesh, sharded=stage > 0)
        self._shards = [self._make_shard(bucket) for bucket in buckets]
        self._unique_grads = [view for shard in self._shards for view in self._unique(shard)]

    def _make_shard(self, bucket: Bucket) -> _Shard:
        start, stop = 0, bucket.plan.numel
        if self.stage > 0:
            start, stop = bucket.plan.owned(self.mesh.dp.size, self.mesh.dp.index)
        own = bucket.params[start:stop]
        master = own if own.dtype == torch.float32 else own.float()
        states = tuple(torch.zeros_like(master) for _ in self._rule.state_names)
        segments = tuple(_segments(bucket, start, stop, self._config))
        return _Shard(bucket, start, stop, master, states, segments)

    def _unique(self, shard: _Shard) -> Iterator[Tensor]:
        """Gradient runs of the owned chunk, without padding and without other ranks' copies."""
        for _, box, base in self._boxes(shard, only_owned=True):
            start = base + box.flat_start
            yield shard.bucket.grads[start : start + box.numel]

    def _boxes(self, shard: _Shard, *, only_owned: bool) -> Iterator[tuple[Entry, Box, int]]:
        """Boxes of a shard with the bucket offset their `flat_start` counts from.

        `only_owned`: the chunk this rank owns and, of replicated elements, the first copy; else
        everything in the updated range.
        """
        dp, tp = self.mesh.dp, self.mesh.tp
        start, stop = shard.start, shard.stop
        if only_owned:
            start, stop = shard.bucket.plan.owned(dp.size, dp.index)
        for entry, place in shard.bucket.placed():
            low, high = max(start, place.start), min(stop, place.stop)
            if low >= high:
                continue
            is_second_copy = entry.spec.tied and self.mesh.tied.index > 0
            for box in flat_range_boxes(
                entry.spec, tp.size, tp.index, low - place.start, high - place.start
            ):
                if not only_owned or (box.copy_index == 0 and not is_second_copy):
                    yield entry, box, place.start

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.gradients.reset()

    def finish_gradients(self) -> None:
        """Complete the sums over tied and replicated copies and over data-parallel ranks."""
        self.gradients.finish()

    def grad_norm(self) -> float:
        """L2 norm of the model's whole gradient, each element counted once; equal on all ranks.

        Not finite if any gradient is not. A collective call.
        """
        return global_norm(self._unique_grads, self.mesh)

    def step(self, lr: float, *, grad_divisor: float = 1.0) -> None:
        """Update the owned ranges, then bring every rank's parameters up to date.

        Gradients are divided by `grad_divisor` (loss scale, clipping) where they are read.
        """
        self.updates += 1
        grad_scale = None
        if grad_divisor != 1.0:
            grad_scale = torch.tensor(grad_divisor, device=self.mesh.device)
        handles = []
        for shard in self._shards:
            for decays in (True, False):
                self._update(shard, lr, grad_scale, decays=decays)
            handles.append(self._publish(shard))
        for handle in handles:
            handle.wait()

    def _update(self, shard: _Shard, lr: float, grad_scale: Tensor | None, *, decays: bool) -> None:
        runs = [s for s in shard.segments if s.decays is decays]
        if not runs:
            return
        base = shard.start
        self._rule(
            [shard.master[s.start - base : s.stop - base] for s in runs],
            [shard.bucket.grads[s.start : s.stop] for s in runs],
            [[state[s.start - base : s.stop - base] for s in runs] for state in shard.states],
            step=self.updates,
            lr=lr,
            weight_decay=self._config.weight_decay if decays else 0.0,
            grad_scale=grad_scale,
        )

    def _publish(self, shard: _Shard) -> collectives.Handle:
        """Master weights to model weights, and from the owner to every data-parallel rank."""
        params = shard.bucket.params
        if params.dtype != torch.float32:
            params[shard.start : shard.stop].copy_(shard.master)
        if self.stage == 0:
            return collectives.Handle()
        return collectives.all_gather_flat_async(params, self.mesh.dp)

    def publish(self) -> None:
        """Take the master weights as the model's weights (after loading). A collective call."""
        for handle in [self._publish(shard) for shard in self._shards]:
            handle.wait()

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """`param` and the names of the optimizer's state tensors."""
        return ("param", *self._rule.state_names)

    def pieces(self, *, only_owned: bool, kinds: Sequence[str] = ()) -> Iterator[TensorPiece]:
        """This rank's fp32 model weights and optimizer state as slices of canonical tensors.

        Keys are "<kind>/<canonical name>". `only_owned`: over all ranks every element appears
        exactly once (saving); else all that this rank keeps (loading; call `publish` when the
        data has been written). `kinds` defaults to all of `state_kinds`.
        """
        for shard in self._shards:
            for entry, box, base in self._boxes(shard, only_owned=only_owned):
                start, spec = base + box.flat_start - shard.start, entry.spec
                for kind in kinds or self.state_kinds:
                    flat = shard.flat(kind, self._rule.state_names)
                    data = flat[start : start + box.numel].view(box.shape)
                    yield TensorPiece(
                        f"{kind}/{spec.name}", data.dtype, spec.shape, box.offset, box.shape, data
                    )


def _segments(bucket: Bucket, start: int, stop: int, config: OptimConfig) -> Iterator[_Segment]:
    """Maximal runs of [start, stop) with one weight decay, alignment gaps included in a run."""
    current: _Segment | None = None
    for entry, place in bucket.placed():
        low, high = max(start, place.start), min(stop, place.stop)
        if low >= high:
            continue
        role = entry.spec.role
        decays = role == "matrix" or (role == "embedding" and config.decay_embeddings)
        if current is not None and current.decays == decays:
            current = current._replace(stop=high)
            continue
        if current is not None:
            yield current
        current = _Segment(low, high, decays)
    if current is not None:
        yield current
