"""Flat buffers behind the parameters: parameters and gradients are views of a few large tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megads.parallel.mesh import Mesh
from megads.parallel.sharding import ParamSpec
from megads.zero.partition import BucketKind, BucketPlan, Placement, plan_buckets


@dataclass
class Entry:
    """A parameter of this rank: its spec, the chunk that holds it, its place in a bucket."""

    spec: ParamSpec
    param: nn.Parameter
    chunk: int


@dataclass
class Bucket:
    """Flat parameters (model dtype) and flat gradients (fp32) of the entries packed together."""

    plan: BucketPlan
    entries: tuple[Entry, ...]
    params: Tensor
    grads: Tensor

    def placed(self) -> zip[tuple[Entry, Placement]]:
        """Entries with their places, in bucket order."""
        return zip(self.entries, self.plan.placements, strict=True)

    def grad_view(self, placement: Placement, entry: Entry) -> Tensor:
        """The gradient of one entry, in the parameter's local shape."""
        return self.grads[placement.start : placement.stop].view(entry.param.shape)


def bucket_kind(spec: ParamSpec, mesh: Mesh, *, sequence_parallel: bool) -> BucketKind:
    """What the gradient of `spec` needs before the data-parallel reduction on this mesh."""
    if spec.tied and mesh.pp.size > 1:
        return "tied"
    if mesh.tp.size > 1:
        partial_if_sp = spec.tp_gradient == "partial_if_sequence_parallel" and sequence_parallel
        if spec.tp_gradient == "partial" or partial_if_sp:
            return "tp_partial"
        if spec.has_copies(mesh.tp.size):
            return "kv_copies"
    return "plain"


def build_buckets(
    modules: Sequence[nn.Module],
    specs: Sequence[dict[str, ParamSpec]],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    bucket_mb: float,
    sequence_parallel: bool,
) -> list[Bucket]:
    """Give every parameter of the model chunks memory inside flat buckets.

    `specs[i]` maps parameter names of `modules[i]` to their specs. Parameters (on the meta device
    until now) are replaced in place by uninitialized views, so the order of the buckets is the
    order in which gradients appear in the backward pass: last chunk and last layer first.
    """
    entries: list[Entry] = []
    for chunk in reversed(range(len(modules))):
        named = list(modules[chunk].named_parameters())
        entries += [Entry(specs[chunk][name], param, chunk) for name, param in reversed(named)]
    plans = plan_buckets(
        [entry.chunk for entry in entries],
        [bucket_kind(e.spec, mesh, sequence_parallel=sequence_parallel) for e in entries],
        [entry.param.numel() for entry in entries],
        dp=mesh.dp.size,
        bucket_numel=int(bucket_mb * 2**20 / 4),
    )
    replacements: dict[int, nn.Parameter] = {}
    buckets = []
    for plan in plans:
        params = torch.zeros(plan.numel, dtype=dtype, device=mesh.device)
        grads = torch.zeros(plan.numel, dtype=torch.float32, device=mesh.device)
        held = tuple(entries[p.index] for p in plan.placements)
        for entry, place in zip(held, plan.placements, strict=True):
            view = params[place.start : place.stop].view(entry.param.shape)
            replacement = nn.Parameter(view)
            replacements[id(entry.param)] = replacement
            entry.param = replacement
        buckets.append(Bucket(plan, held, params, grads))
    for module in modules:
        _replace_parameters(module, replacements)
    return buckets


def _replace_parameters(root: nn.Module, replacements: dict[int, nn.Parameter]) -> None:
    for module in root.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in replacements:
                setattr(module, name, replacements[id(param)])
