"""Flat buffers behind the parameters: parameters and gradients are views of a few large tensors."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megads.parallel.ledger import Ledger
from megads.parallel.mesh import Mesh
from megads.parallel.sharding import ParamSpec
from megads.parallel.units import UnitHooks
from megads.zero.partition import BucketPlan, Item, Placement, plan_buckets

Copies = Literal["none", "tp_partial", "kv", "tied"]
"""Who else adds to a parameter's gradient, apart from data-parallel ranks: nobody; all tp ranks;
the ranks that hold copies of the same KV heads, to their rows; the other end of the pipeline."""


class ShardedModule(Protocol):
    """A model chunk, as ZeRO sees it (see `GPTStage`)."""

    specs: dict[str, ParamSpec]
    units: dict[str, tuple[str, ...]]
    unit_hooks: UnitHooks | None


class Flat:
    """A flat tensor whose memory can be given back while views of it stay valid.

    Views, and what autograd saved of them, see the new memory after the next `acquire`; its
    content is undefined, but for zeros in the gaps between parameters. New views can only be made
    while there is memory. Writing to `tensor` goes unseen by autograd, which must not take
    parameters that were fetched again for other ones.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        gaps: Sequence[slice],
        ledger: Ledger,
    ) -> None:
        memory = _Pages if device.type == "cpu" else _Storage
        self._memory = memory(numel, dtype, device)
        self.tensor = self._memory.tensor.data
        self._gaps, self.ledger = gaps, ledger
        self._nbytes, self._is_held = self.tensor.nbytes, True
        ledger.add(self._nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes held at the moment."""
        return self._nbytes if self._is_held else 0

    def view(self, place: Placement, shape: torch.Size) -> Tensor:
        """The elements at `place`, as part of autograd's world."""
        return self._memory.tensor[place.start : place.stop].view(shape)

    def acquire(self) -> None:
        """Make sure that there is memory."""
        if self._is_held:
            return
        self._memory.take()
        self._is_held = True
        self.ledger.add(self._nbytes)
        for gap in self._gaps:
            self.tensor[gap].zero_()

    def release(self) -> None:
        """Give the memory back."""
        if self._is_held:
            self.ledger.add(-self._nbytes)
            self._is_held = False
            self._memory.give_back()


class _Storage:
    """Memory of a device: its allocator keeps what is given back for the next who asks."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.nbytes

    def take(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)

    def give_back(self) -> None:
        self.tensor.untyped_storage().resize_(0)


class _Pages:
    """Memory of the host, mapped for this tensor alone.

    The C library would keep what is given back, in pieces that the next bucket does not fit into:
    three gigabytes in a model of 0.8 billion parameters.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._pages, dtype=dtype)

    def take(self) -> None:
        """Pages come when they are touched."""

    def give_back(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


@dataclass
class Entry:
    """A parameter of this rank: its spec, the chunk that holds it, its name there.

    `grad`: its place in the bucket's gradients, in the parameter's shape.
    """

    spec: ParamSpec
    param: nn.Parameter
    chunk: int
    name: str
    copies: Copies
    grad: Tensor


@dataclass
class Bucket:
    """Flat parameters (model dtype) and flat gradients (fp32) of the entries packed together."""

    plan: BucketPlan
    entries: tuple[Entry, ...]
    params: Flat
    grads: Flat

    @property
    def ledgers(self) -> tuple[Ledger, Ledger]:
        """Of the parameters and of the gradients of all buckets made together."""
        return self.params.ledger, self.grads.ledger

    def placed(self) -> zip[tuple[Entry, Placement]]:
        """Entries with their places, in bucket order."""
        return zip(self.entries, self.plan.placements, strict=True)


def copies_of(spec: ParamSpec, mesh: Mesh, *, sequence_parallel: bool) -> Copies:
    """Whose contributions the gradient of `spec` needs on this mesh."""
    if spec.tied and mesh.pp.size > 1:
        return "tied"
    if mesh.tp.size > 1:
        partial_if_sp = spec.tp_gradient == "partial_if_sequence_parallel" and sequence_parallel
        if spec.tp_gradient == "partial" or partial_if_sp:
            return "tp_partial"
        if spec.has_copies(mesh.tp.size):
            return "kv"
    return "none"


def build_buckets(
    modules: Sequence[nn.Module],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    bucket_numel: int,
    sequence_parallel: bool,
) -> list[Bucket]:
    """Make flat buckets for the parameters of the model chunks, without memory for now.

    Parameters (on the meta device until now) are replaced by views of a bucket. Buckets are in
    the order in which gradients appear in the backward pass: last chunk and last layer first.
    """
    entries = [
        entry
        for chunk in reversed(range(len(modules)))
        for entry in _entries(modules[chunk], chunk, mesh, sequence_parallel=sequence_parallel)
    ]
    plans = plan_buckets(
        [
            Item(e.chunk, _unit_of(modules[e.chunk], e.name), e.param.numel(), e.copies == "tied")
            for e in entries
        ],
        dp=mesh.dp.size,
        bucket_numel=bucket_numel,
    )
    replacements: dict[int, nn.Parameter] = {}
    buckets, of_params, of_grads = [], Ledger(), Ledger()
    for plan in plans:
        gaps = _gaps(plan)
        params = Flat(plan.numel, dtype, mesh.device, gaps, of_params)
        grads = Flat(plan.numel, torch.float32, mesh.device, gaps, of_grads)
        held = tuple(entries[p.index] for p in plan.placements)
        for entry, place in zip(held, plan.placements, strict=True):
            view = params.view(place, entry.param.shape)
            replacement = nn.Parameter(view, requires_grad=entry.param.requires_grad)
            replacements[id(entry.param)] = replacement
            entry.param, entry.grad = replacement, grads.view(place, view.shape)
        params.release()
        grads.release()
        buckets.append(Bucket(plan, held, params, grads))
    for module in modules:
        _replace_parameters(module, replacements)
    return buckets


def _entries(
    module: nn.Module, chunk: int, mesh: Mesh, *, sequence_parallel: bool
) -> Iterator[Entry]:
    """The parameters of a chunk in backward order."""
    specs: dict[str, ParamSpec] = module.specs  # type: ignore[assignment]
    params = dict(module.named_parameters())
    for name, spec in reversed(specs.items()):
        copies = copies_of(spec, mesh, sequence_parallel=sequence_parallel)
        yield Entry(spec, params[name], chunk, name, copies, params[name])


def _unit_of(module: nn.Module, name: str) -> str:
    """The first unit that reads a parameter: the last whose backward adds to its gradient."""
    units: dict[str, tuple[str, ...]] = module.units  # type: ignore[assignment]
    return next(unit for unit, names in units.items() if name in names)


def _gaps(plan: BucketPlan) -> list[slice]:
    """The alignment gaps of a bucket and its padding."""
    starts = [*(place.start for place in plan.placements[1:]), plan.numel]
    stops = [place.stop for place in plan.placements]
    return [slice(a, b) for a, b in zip(stops, starts, strict=True) if a < b]


def _replace_parameters(root: nn.Module, replacements: dict[int, nn.Parameter]) -> None:
    for module in root.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) in replacements:
                setattr(module, name, replacements[id(param)])
