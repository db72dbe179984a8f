"""Can this configuration run? All problems at once, before any process starts. No torch.

Each problem names the dotted path, the numbers that disagree and what would be valid. Checks of a
single value are in the schema; what only the machine can tell (devices, memory) is the launcher's.
"""

from __future__ import annotations

from collections.abc import Iterator

from megads.config.bad_steps import bad_step_problems
from megads.config.data_files import data_problems
from megads.config.directories import directory_problems, load_problems
from megads.config.loggers import logger_problems
from megads.config.model import ModelConfig
from megads.config.optimizer import optimizer_problems
from megads.config.rampup import BatchRampup
from megads.config.schema import COMPILED_OPERATIONS, Config, KernelsConfig
from megads.config.stages import stage_problems
from megads.config.streams import is_streamed, setting_problems
from megads.errors import ConfigError, LayoutError, told_by
from megads.parallel.layout import ParallelLayout


def validate(config: Config, world_size: int | None = None) -> list[str]:
    """Every reason why `config` cannot run on `world_size` processes; empty when it can.

    Without a world size the layout's own is taken, with dp 1 where it is not given.
    """
    return _of_settings(config, world_size) + _of_files(config)


def _of_settings(config: Config, world_size: int | None) -> list[str]:
    problems = list(_world(config, world_size))
    problems += _tensor_parallel(config)
    problems += _pipeline(config)
    dp = fill_layout(config, world_size or 1).dp
    problems += _zero(config, dp)
    problems += _batch(config, dp)
    problems += _sequence(config)
    problems += _kernels(config)
    problems += optimizer_problems(config)
    problems += _evaluation_and_checkpoints(config)
    problems += bad_step_problems(config)
    problems += logger_problems(config, world_size)
    problems += setting_problems(config, dp)
    problems += _data_order(config)
    return problems


def _of_files(config: Config) -> list[str]:
    """What another machine may not find."""
    return [*directory_problems(config), *data_problems(config)]


def check(config: Config, world_size: int | None = None) -> None:
    """Raise ConfigError with all problems that `validate` finds."""
    settings, files = _of_settings(config, world_size), _of_files(config)
    if settings or files:
        with told_by("machine" if files else "job"):
            raise ConfigError(settings + files)


def resolve_layout(config: Config, world_size: int | None = None) -> ParallelLayout:
    """The sizes of all axes; dp, where it is not given, is what the world size leaves (or 1).

    Raises LayoutError when the sizes do not make up the world.
    """
    problems = list(_world(config, world_size))
    if problems:
        raise LayoutError(problems)
    return fill_layout(config, world_size or 1)


def fill_layout(config: Config, devices: int) -> ParallelLayout:
    """The layout with as much data parallelism as `devices` have room for, where dp is not given.

    dp is at least 1: the layout may need more than there are, and need not use all of them.
    """
    parallel = config.parallel
    dp = parallel.dp or max(1, devices // (parallel.tp * parallel.pp))
    return ParallelLayout(tp=parallel.tp, pp=parallel.pp, dp=dp)


def valid_tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """Sizes of the tp axis that split heads and MLP evenly; KV heads may be replicated."""
    kv = model.num_kv_heads
    return [
        tp
        for tp in _divisors(model.num_attention_heads)
        if model.ffn_hidden_size % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    ]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    words = [str(n) for n in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _world(config: Config, world_size: int | None) -> Iterator[str]:
    parallel = config.parallel
    if world_size is None:
        return
    model_size = parallel.tp * parallel.pp
    sizes = f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp}"
    if parallel.dp is None and world_size % model_size:
        yield (
            f"{sizes} needs a multiple of {model_size} processes, there are {world_size}; "
            f"valid products of tp and pp: {_listed(_divisors(world_size))}"
        )
    elif parallel.dp is not None and model_size * parallel.dp != world_size:
        yield (
            f"{sizes} x parallel.dp={parallel.dp} needs {model_size * parallel.dp} processes, "
            f"there are {world_size}"
        )


def _tensor_parallel(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    valid = f"valid tp: {_listed(valid_tensor_parallel_sizes(model))}"
    if model.num_attention_heads % tp:
        yield (
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"parallel.tp={tp}; {valid}"
        )
    kv_differ = model.num_kv_heads != model.num_attention_heads
    if kv_differ and model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield (
            f"model.num_kv_heads={model.num_kv_heads} neither divides nor is a multiple of "
            f"parallel.tp={tp}; {valid}"
        )
    if model.ffn_hidden_size % tp:
        yield (
            f"model.ffn_hidden_size={model.ffn_hidden_size} is not a multiple of "
            f"parallel.tp={tp}; {valid}"
        )
    if config.parallel.sequence_parallel and tp == 1:
        yield (
            "parallel.sequence_parallel=true splits activations over the tensor-parallel ranks and "
            "needs parallel.tp of 2 or more, it is 1"
        )


def _pipeline(config: Config) -> Iterator[str]:
    parallel = config.parallel
    yield from stage_problems(config.model.num_layers, parallel.pp, parallel.chunks, parallel.split)
    if parallel.chunks > 1 and parallel.pp == 1:
        yield f"parallel.chunks={parallel.chunks} needs parallel.pp of 2 or more, it is 1"
    if parallel.schedule == "interleaved" and parallel.chunks == 1:
        yield "parallel.schedule=interleaved needs parallel.chunks of 2 or more, it is 1"
    if parallel.schedule == "1f1b" and parallel.chunks > 1:
        yield (
            f"parallel.chunks={parallel.chunks} needs parallel.schedule=interleaved (or auto), "
            f"it is 1f1b"
        )


def _zero(config: Config, dp: int) -> Iterator[str]:
    parallel = config.parallel
    size = parallel.zero_shard_size
    if size is not None and parallel.zero == 0:
        yield (
            f"parallel.zero_shard_size={size} has no meaning with parallel.zero=0, which shards "
            f"nothing; take zero 1, 2 or 3"
        )
    elif size is not None and dp % size:
        yield (
            f"parallel.zero_shard_size={size} does not divide the data parallel size {dp}; it can "
            f"be {_listed(_divisors(dp))}"
        )
    if parallel.offload_path is not None and parallel.offload != "nvme":
        yield (
            f"parallel.offload_path={parallel.offload_path} is only read with "
            f"parallel.offload=nvme, not {parallel.offload}"
        )


def _batch(config: Config, dp: int) -> Iterator[str]:
    train = config.train
    unit = train.micro_batch_size * dp
    unit_text = f"train.micro_batch_size={train.micro_batch_size} x dp={dp} = {unit}"
    total = train.global_batch_size
    if total % unit:
        near = [n for n in (total // unit * unit, -(-total // unit) * unit) if n]
        yield (
            f"train.global_batch_size={total} is not a multiple of {unit_text}; "
            f"nearest: {_listed(near)}"
        )
    if train.batch_rampup is None:
        return
    start, increment, _ = train.batch_rampup
    for word, size in (("start", start), ("increment", increment)):
        if size % unit:
            yield f"train.batch_rampup: {word} {size} is not a multiple of {unit_text}"
    try:
        BatchRampup.make(train.batch_rampup, total)
    except ConfigError as error:
        yield from error.problems


def _sequence(config: Config) -> Iterator[str]:
    length, model, tp = config.train.seq_length, config.model, config.parallel.tp
    if config.parallel.sequence_parallel and length % tp:
        near = [n for n in (length // tp * tp, -(-length // tp) * tp) if n]
        yield (
            f"train.seq_length={length} is not a multiple of parallel.tp={tp}, which "
            f"parallel.sequence_parallel needs; nearest: {_listed(near)}"
        )
    layers, recompute = config.train.recompute_layers, config.train.recompute
    if layers is not None and recompute != "full":
        yield (
            f"train.recompute_layers={layers} is only read with train.recompute=full, "
            f"not {recompute}"
        )
    if model.position == "learned" and length > model.max_seq_length:
        yield (
            f"train.seq_length={length} is more than the model.max_seq_length="
            f"{model.max_seq_length} positions there are; lower the one or raise the other"
        )
    if model.position != "rope" and model.rope_scaling is not None:
        yield f"model.rope_scaling needs model.position=rope, it is {model.position}"


def _kernels(config: Config) -> Iterator[str]:
    for op in KernelsConfig.model_fields:
        if op not in ("name", *COMPILED_OPERATIONS) and getattr(config.kernels, op) == "compiled":
            yield (
                f"kernels.{op}=compiled: this backend has no {op}, only "
                f"{', '.join(COMPILED_OPERATIONS)}; choose auto, reference or torch"
            )


def _evaluation_and_checkpoints(config: Config) -> Iterator[str]:
    data, checkpoint = config.data, config.checkpoint
    from_training = not data.valid_paths and not is_streamed(config)
    if config.eval.every and from_training and not data.valid_fraction:
        yield (
            f"eval.every={config.eval.every} needs validation data: data.valid_paths is empty and "
            f"data.valid_fraction is 0"
        )
    if checkpoint.keep == 0 or checkpoint.keep < -1:
        yield f"checkpoint.keep={checkpoint.keep}: must be -1 (all) or 1 or more"
    yield from load_problems(config)
    if checkpoint.load is None and checkpoint.load_what != "all":
        yield (
            f"checkpoint.load_what={checkpoint.load_what} is only read with checkpoint.load, which "
            f"is not set"
        )


def _data_order(config: Config) -> Iterator[str]:
    data, sources = config.data, len(config.data.paths)
    for name, values in (("epochs", data.epochs), ("limits", data.limits)):
        if values is not None and len(values) not in (1, sources):
            yield (
                f"data.{name} has {len(values)} entries for {sources} data.paths; give one for "
                f"each, or one number for all"
            )
    for first, after in data.skip:
        if after <= first:
            yield f"data.skip=[[{first}, {after}]]: a range [first, after) must hold something"
