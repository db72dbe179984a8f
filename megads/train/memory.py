"""What a configuration will hold in memory on each rank. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megads.config.schema import Config, OptimConfig
from megads.errors import LayoutError
from megads.models.activations import Kept, PassSize, kept_bytes, table_bytes
from megads.models.stage import stage_specs, stage_units
from megads.parallel.layout import ParallelLayout
from megads.parallel.sharding import ParamSpec
from megads.pipeline.partition import ChunkPlan, plan_stages
from megads.pipeline.schedule import build_schedule
from megads.zero.memory import StateMemory, predict_memory
from megads.zero.partition import BucketPlan, Item, plan_buckets

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def predict_states(config: Config, layout: ParallelLayout, stage: int) -> StateMemory:
    """Bytes of the model states on a rank of pipeline stage `stage`; equal for all of its ranks."""
    parallel = config.parallel
    chunks = _chunks(config, layout, stage)
    plans, reads = _buckets(config, layout, chunks)
    return predict_memory(
        plans,
        reads,
        shard_size=shard_size(config, layout.dp),
        stage=parallel.zero,
        offload=parallel.offload,
        itemsize=ITEM_BYTES[config.precision.name],
        moments=count_moments(config.optim),
        budget=offload_budget(config),
    )


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes kept for backward passes, at most at a time on one rank. `tables`: made once."""

    device: int
    host: int
    tables: int


def predict_activations(
    config: Config, layout: ParallelLayout, stage: int, *, device: Literal["cpu", "cuda"]
) -> ActivationMemory:
    """What the forward passes of pipeline stage `stage` keep for backward, at most at a time.

    Counted as `SavedTensors` does, with the `torch` kernels; the schedule says which microbatches
    are under way at once. Working memory of the operations themselves comes on top.
    """
    train, parallel = config.train, config.parallel
    size = PassSize(
        train.micro_batch_size,
        train.seq_length,
        layout.tp,
        parallel.sequence_parallel,
        ITEM_BYTES[config.precision.name],
        train.recompute,
        train.recompute_layers,
        device,
        config.data.document_mask,
    )
    chunks = _chunks(config, layout, stage)
    kept = [kept_bytes(config.model, chunk, size) for chunk in chunks]
    microbatches = train.global_batch_size // (train.micro_batch_size * layout.dp)
    actions = build_schedule(parallel.schedule, layout.pp, parallel.chunks, microbatches)[stage]
    passes = [(action.op, kept[action.chunk]) for action in actions if action.op in ("F", "B")]
    tables = sum(table_bytes(config.model, chunk, size) for chunk in chunks)
    if not train.offload_activations:
        return ActivationMemory(_peak(passes, lambda k: k.blocks + k.rest), 0, tables)
    on_host = _peak(passes, lambda k: k.copied)
    return ActivationMemory(_peak(passes, lambda k: k.rest), on_host, tables)


def _peak(passes: Sequence[tuple[str, Kept]], nbytes: Callable[[Kept], int]) -> int:
    now = peak = 0
    for op, kept in passes:
        now += nbytes(kept) if op == "F" else -nbytes(kept)
        peak = max(peak, now)
    return peak


def world_states(config: Config, layout: ParallelLayout) -> tuple[int, int]:
    """Bytes of the model states of all ranks together: in memory of devices and hosts, in files."""
    stages = [predict_states(config, layout, stage) for stage in range(layout.pp)]
    ranks = layout.tp * layout.dp
    memory = sum(s.device.total + s.host.total for s in stages) * ranks
    return memory, sum(s.file for s in stages) * ranks


def require_room(config: Config, layout: ParallelLayout, stage: int, nbytes: int) -> None:
    """Raise LayoutError if a rank's model states alone are more than the `nbytes` of its GPU."""
    states = predict_states(config, layout, stage).device
    if states.total > nbytes:
        parts = (f"{name} {size / 1e9:.1f}" for name, size in vars(states).items() if size)
        raise LayoutError(
            f"the model states of {config.model.name} on a GPU of pipeline stage {stage} take "
            f"{states.total / 1e9:.1f} GB ({', '.join(parts)}), it has {nbytes / 1e9:.1f} GB: more "
            f"of parallel.tp or parallel.pp, parallel.zero=3 or parallel.offload make them smaller"
        )


def shard_size(config: Config, dp: int) -> int:
    """Ranks over which ZeRO shards; 1 under stage 0."""
    return (config.parallel.zero_shard_size or dp) if config.parallel.zero else 1


def offload_budget(config: Config) -> int:
    """Bytes of host memory through which a rank streams its state from a file."""
    return int(config.parallel.offload_budget_mb * 2**20)


def bucket_numel(config: Config) -> int:
    """Elements of a bucket; gradients are fp32."""
    return int(config.parallel.bucket_mb * 2**20 / 4)


def count_moments(optim: OptimConfig) -> int:
    """fp32 values that the optimizer keeps for each parameter, apart from its master."""
    if optim.name == "adamw":
        return 2
    return 1 if optim.momentum else 0


def _chunks(config: Config, layout: ParallelLayout, stage: int) -> tuple[ChunkPlan, ...]:
    parallel = config.parallel
    plan = plan_stages(
        config.model, layout.pp, parallel.chunks, config.train.seq_length, split=parallel.split
    )
    return plan.chunks_of(stage)


def _buckets(
    config: Config, layout: ParallelLayout, chunks: tuple[ChunkPlan, ...]
) -> tuple[list[BucketPlan], list[dict[str, list[int]]]]:
    """The buckets of a stage as `build_buckets` makes them, and which of them each unit reads."""
    items: list[Item] = []
    names: list[tuple[int, str]] = []
    units = []
    for chunk, place in enumerate(chunks):
        specs = stage_specs(config.model, place)
        units.append(stage_units(specs, place))
        for name, spec in specs.items():
            unit = next(u for u, read in units[chunk].items() if name in read)
            tied = spec.tied and layout.pp > 1
            items.append(Item(chunk, unit, _local_numel(spec, layout.tp), tied))
            names.append((chunk, name))
    items.reverse()
    names.reverse()
    plans = plan_buckets(items, dp=layout.dp, bucket_numel=bucket_numel(config))
    bucket_of = {
        names[place.index]: number for number, plan in enumerate(plans) for place in plan.placements
    }
    reads = [
        {u: sorted({bucket_of[chunk, name] for name in read}) for u, read in of_chunk.items()}
        for chunk, of_chunk in enumerate(units)
    ]
    return plans, reads


def _local_numel(spec: ParamSpec, tp: int) -> int:
    return math.prod(spec.local_shape(tp))
