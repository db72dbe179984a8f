"""Megatron-LM's `distrib_optim.pt`: the distributed optimizer's state of a model-parallel rank.

It holds, for each buffer of parameters of one type, flat tensors with the master weights and both
moments of all data-parallel ranks. Nothing in it says where a parameter is: the buffer's layout
has to be made again. Parameters come in the reverse of the model's order, each at a multiple of 64
elements; a buffer is cut into buckets once one has reached a size, and a tied embedding with a
copy on another stage has a bucket of its own. What pads a bucket at its end is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megads.convert.megatron.state import Held, RankState
from megads.convert.pickles import load_pickle
from megads.convert.source import Kind
from megads.errors import CheckpointError

_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
"""What every padded end of a bucket is a multiple of."""
_EMBEDDING = "embedding.word_embeddings.weight"
_KINDS: tuple[Kind, ...] = ("param", "exp_avg", "exp_avg_sq")
"""The file calls them by the same names."""

_Place = tuple[int, str]


@dataclass(frozen=True)
class Slot:
    """Where a parameter is: its bucket, and the first of its elements there."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BufferLayout:
    """`slots` by parameter; `sizes`: elements of each bucket, the padding at its end left out.

    `before_alone`: the bucket before the one of the tied embedding. Some versions count its padding
    too, where its end is no multiple of the data-parallel size.
    """

    slots: Mapping[str, Slot]
    sizes: tuple[int, ...]
    before_alone: int | None = None

    def sizes_of(self, total: int) -> tuple[int, ...] | None:
        """The buckets of a buffer of so many elements; None if there is no such buffer."""
        sizes, padding = list(self.sizes), total - sum(self.sizes)
        if padding and self.before_alone is not None:
            sizes[self.before_alone] += padding
            fits = padding > 0 and sizes[self.before_alone] % _BUCKET_ALIGNMENT == 0
            return tuple(sizes) if fits else None
        return None if padding else self.sizes


def buffer_layout(
    numels: Mapping[str, int], bucket_size: int | None, alone: str | None
) -> BufferLayout:
    """The layout of a buffer; `numels` in model order, `alone`: what has a bucket of its own."""
    slots: dict[str, Slot] = {}
    sizes: list[int] = []
    end, empty, before_alone = 0, True, None
    for name, numel in reversed(tuple(numels.items())):
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if name == alone and not empty:
            before_alone = len(sizes)
            sizes.append(start)
            start = 0
        slots[name] = Slot(len(sizes), start)
        end, empty = start + numel, False
        if name == alone or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end, empty = 0, True
    if not empty:
        sizes.append(end)
    return BufferLayout(slots, tuple(sizes), before_alone)


def read_buffers(path: Path, rank: RankState) -> dict[Kind, dict[_Place, Held]]:
    """Master weights and moments of a rank's parameters, as views of the flat tensors.

    Raises CheckpointError if the layout does not fit what the file holds.
    """
    content = load_pickle(path)
    label = f"{rank.label.rpartition('/')[0]}/{path.name}"
    found: dict[Kind, dict[_Place, Held]] = {kind: {} for kind in _KINDS}
    buffers = sorted(key for key in content if isinstance(key, int))
    number = 0
    for chunk, parameters in enumerate(rank.chunks):
        for dtype in dict.fromkeys(held.tensor.dtype for held in parameters.values()):
            of_type = {n: h for n, h in parameters.items() if h.tensor.dtype == dtype}
            if number >= len(buffers):
                raise CheckpointError(f"{path} has {len(buffers)} buffers, the model needs more")
            layout = buffer_layout(
                {name: held.tensor.numel() for name, held in of_type.items()},
                _bucket_size(rank, chunk),
                _alone(rank, of_type),
            )
            (buffer,) = content[buffers[number]].values()
            for kind in _KINDS:
                flat = _flat(path, buffer, kind, layout)
                for name, held in of_type.items():
                    slot = layout.slots[name]
                    piece = flat[slot.bucket][slot.start : slot.start + held.tensor.numel()]
                    origin = f"{label}:{buffers[number]}.{kind}[{name}]"
                    found[kind][chunk, name] = Held(origin, piece.view(held.tensor.shape))
            number += 1
    if number < len(buffers):
        raise CheckpointError(f"{path} has {len(buffers)} buffers, and the model has {number}")
    return found


def _flat(path: Path, buffer: Any, key: str, layout: BufferLayout) -> Sequence[Tensor]:
    """The elements of each bucket; older versions keep buckets apart, and padded."""
    if isinstance(buffer, dict):
        total = buffer[key].numel()
        of_buckets = layout.sizes_of(total)
        if of_buckets is None:
            raise CheckpointError(
                f"{path}: {key} has {total} elements, and the model's parameters take "
                f"{sum(layout.sizes)}: it is of another layout"
            )
        pieces: Sequence[Tensor] = buffer[key].split(of_buckets)
        return pieces
    sizes = tuple(bucket[key].numel() for bucket in buffer)
    if len(sizes) != len(layout.sizes) or any(
        have < want for have, want in zip(sizes, layout.sizes, strict=True)
    ):
        raise CheckpointError(
            f"{path}: {key} has buckets of {sizes} elements, and the model's parameters take "
            f"{layout.sizes}: it is of another layout"
        )
    return [bucket[key] for bucket in buffer]


def _bucket_size(rank: RankState, chunk: int) -> int | None:
    """Only the chunk with the embedding is cut, and only to overlap communication."""
    args = rank.args
    if not args.get("overlap_grad_reduce") or _EMBEDDING not in rank.chunks[chunk]:
        return None
    if args.get("ddp_num_buckets"):
        total = sum(held.tensor.numel() for part in rank.chunks for held in part.values())
        return int(total // args["ddp_num_buckets"])
    size = args.get("ddp_bucket_size")
    return int(size or max(40_000_000, 1_000_000 * args.get("data_parallel_size", 1)))


def _alone(rank: RankState, parameters: Mapping[str, Held]) -> str | None:
    """The tied embedding, if another stage has a copy of it."""
    args = rank.args
    if (
        args.get("untie_embeddings_and_output_weights")
        or (args.get("pipeline_model_parallel_size") or 1) == 1
    ):
        return None
    for name in (_EMBEDDING, "output_layer.weight"):
        if name in parameters:
            return name
    return None
