"""Writing the `torch` format of Megatron-LM core, at any tensor- and pipeline-parallel size.

Weights only: a run starts from them with `--finetune`, or `--no-load-optim --no-load-rng`. Their
names are those of `--transformer-impl local`.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.convert.megatron.args import write_args
from megads.convert.megatron.files import RANK_FILE, TRACKER, rank_folder
from megads.convert.megatron.join import part_shape, split
from megads.convert.megatron.names import core_names, layer_of, with_layer
from megads.convert.narrow import retype
from megads.convert.source import Report, Source, WriteOptions
from megads.convert.torch_writing import Pending, save
from megads.errors import CheckpointError
from megads.models.families import WORD_EMBEDDING, param_specs
from megads.parallel.sharding import ParamSpec

_LINEAR = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class _Stage:
    """A pipeline stage: its layers, and its number among how many."""

    index: int
    count: int
    layers: range

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def holds(self, spec: ParamSpec) -> bool:
        if spec.layer is not None:
            return spec.layer in self.layers
        return self.index == 0 if spec.edge == "first" else self.is_last


def write(source: Source, target: Path, options: WriteOptions, report: Report) -> None:
    """Fill `target`; one tensor is in memory at a time.

    Raises CheckpointError for a model or a layout that Megatron-LM cannot express.
    """
    args = write_args(source.model) | _layout_args(source, options)
    stages = _stages(source.model.num_layers, options.pp)
    if options.pp > 1 and len(stages[0].layers) != len(stages[-1].layers):
        args["decoder_first_pipeline_num_layers"] = len(stages[0].layers)
    step = source.trained.step
    folder = target / (f"iter_{step:07d}" if step else "release")
    for stage in stages:
        for rank in range(options.tp):
            model = _rank_state(source, stage, options, rank, report)
            content = {
                "args": argparse.Namespace(**args, rank=stage.index * options.tp + rank),
                "checkpoint_version": 3.0,
                "iteration": step,
                "model": model,
                "num_floating_point_operations_so_far": 0,
            }
            path = folder / rank_folder(rank, stage.index, options.pp) / RANK_FILE
            path.parent.mkdir(parents=True)
            save(content, path)
    with open(target / TRACKER, "w") as handle:
        handle.write(str(step) if step else "release")
        handle.flush()
        os.fsync(handle.fileno())


def _layout_args(source: Source, options: WriteOptions) -> dict[str, Any]:
    model, tp, pp = source.model, options.tp, options.pp
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
    }
    for name, size in sizes.items():
        if size % tp:
            raise CheckpointError(f"{name}={size} cannot be split over tp={tp}")
    if max(tp, model.num_kv_heads) % min(tp, model.num_kv_heads):
        raise CheckpointError(f"num_kv_heads={model.num_kv_heads} cannot be split over tp={tp}")
    if not 1 <= pp <= model.num_layers:
        raise CheckpointError(f"num_layers={model.num_layers} cannot be split over pp={pp}")
    dtype = source.weights_dtype(WORD_EMBEDDING, options)
    rows = next(s for s in param_specs(model) if s.name == WORD_EMBEDDING).local_shape(tp)[0]
    return {
        "seq_length": source.trained.seq_length or model.max_seq_length,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "transformer_pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": tp * pp,
        "padded_vocab_size": rows * tp,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "iteration": source.trained.step,
        "consumed_train_samples": source.trained.samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }


def _stages(layers: int, pp: int) -> list[_Stage]:
    """All stages but the first hold equally many layers, which is what Megatron-LM can express."""
    each = math.ceil(layers / pp)
    if layers - each * (pp - 1) < 1:
        each = layers // pp
    first = layers - each * (pp - 1)
    bounds = [0] + [first + each * stage for stage in range(pp)]
    return [_Stage(i, pp, range(bounds[i], bounds[i + 1])) for i in range(pp)]


def _rank_state(
    source: Source, stage: _Stage, options: WriteOptions, rank: int, report: Report
) -> dict[str, Pending | None]:
    """A rank's weights by name; a tied embedding's copy is on the last of several stages."""
    state: dict[str, Pending | None] = {}
    for spec in param_specs(source.model):
        copied = spec.tied and stage.is_last and stage.index > 0
        if not (stage.holds(spec) or copied):
            continue
        state[_name(spec, stage, copied=copied)] = Pending(
            part_shape(spec, options.tp),
            source.weights_dtype(spec.name, options),
            partial(_part, source, spec, options, rank, None if rank or copied else report),
        )
    for layer in range(len(stage.layers)):
        for module in _LINEAR:
            state[f"decoder.layers.{layer}.{module}._extra_state"] = None
    if stage.is_last:
        state["output_layer._extra_state"] = None
    return state


def _part(
    source: Source, spec: ParamSpec, options: WriteOptions, rank: int, report: Report | None
) -> Tensor:
    """What a rank holds of a weight; `report` is told of it."""
    dtype = source.weights_dtype(spec.name, options)
    whole = retype(source.tensor("param", spec.name), dtype, spec.name)
    if report is not None:
        report("param", spec.name)
    return split(whole, spec, source.model, tp=options.tp, rank=rank)


def _name(spec: ParamSpec, stage: _Stage, *, copied: bool) -> str:
    """The name in the file, where layers are numbered from 0 in every stage."""
    if copied:
        return "output_layer.weight"
    name = core_names(spec.name)[0]
    layer = layer_of(name)
    return name if layer is None else with_layer(name, layer - stage.layers.start)
