"""The only wiring file: from a configuration to everything a run needs, in one fixed order."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.checkpoint.store import CheckpointStore
from megads.config.schema import Config
from megads.config.validate import make_run_dir, resolve_layout
from megads.data.loader import TokenLoader, open_loader
from megads.data.prepare import prepare_data
from megads.data.sampler import BatchRampup
from megads.kernels.api import Kernels, select_kernels
from megads.launch.env import RankInfo
from megads.models.gpt import GPTStage
from megads.models.init import initialize_parameter
from megads.optim.lr import learning_rate
from megads.optim.scaler import LossScaler
from megads.optim.update import make_update_rule
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import BatchPlan
from megads.parallel.mesh import Mesh
from megads.pipeline.executor import PipelineExecutor
from megads.pipeline.partition import StagePlan, plan_stages
from megads.train.metrics import Metrics
from megads.train.state import TrainState
from megads.zero.buckets import Bucket, build_buckets
from megads.zero.optimizer import ZeroOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class RunParts:
    """What `build` made. `modules` are this rank's model chunks."""

    config: Config
    mesh: Mesh
    plan: StagePlan
    modules: list[GPTStage]
    executor: PipelineExecutor
    optimizer: ZeroOptimizer
    scaler: LossScaler
    rampup: BatchRampup
    loader: TokenLoader
    valid_loader: TokenLoader | None
    store: CheckpointStore
    metrics: Metrics
    state: TrainState

    def batch_plan(self, consumed_samples: int) -> BatchPlan:
        """The global batch that begins after `consumed_samples` samples."""
        train, dp = self.config.train, self.mesh.dp.size
        size = self.rampup.size_at(consumed_samples)
        return BatchPlan(
            train.micro_batch_size, size // (train.micro_batch_size * dp), dp, train.seq_length
        )

    def learning_rate(self, batch: BatchPlan) -> float:
        """The rate of the update that `batch` leads to, from what will then be consumed."""
        optim, steps = self.config.optim, self.config.train.steps
        if optim.units == "steps":
            return learning_rate(optim, self.state.step + 1, steps)
        consumed = self.state.samples + batch.global_batch_size
        remaining = steps - self.state.step - 1
        return learning_rate(optim, consumed, self.rampup.consumed_after(remaining, consumed))


def build(config: Config, info: RankInfo) -> RunParts:
    """Make everything of a run, resumed from its newest checkpoint if there is one. Collective.

    The process group must have been started. Raises ConfigError or CheckpointError.
    """
    layout = resolve_layout(config, info.world_size)
    mesh = Mesh.build(layout, info.rank, num_kv_heads=config.model.num_kv_heads, device=info.device)
    plan = plan_stages(
        config.model,
        layout.pp,
        config.parallel.chunks,
        config.train.seq_length,
        split=config.parallel.split,
    )
    dtype = DTYPES[config.precision.name]
    kernels, chosen = select_kernels(config.kernels, mesh.device, dtype)
    modules = build_modules(config, plan, mesh, kernels, dtype)
    buckets = build_parameters(config, modules, mesh, dtype)
    rule = make_update_rule(config.optim, kernels.adamw)
    optimizer = ZeroOptimizer(buckets, mesh, rule, config.optim, stage=config.parallel.zero)
    state = TrainState(run_id=collectives.broadcast_object(secrets.token_hex(4), mesh.world))
    scaler = LossScaler(config.precision)
    executor = build_executor(config, plan, modules, mesh, dtype, state)
    make_run_dir(config)
    loader, valid_loader = build_loaders(config, mesh)
    store = CheckpointStore(
        Path(config.run.dir) / "checkpoints", mesh.world, keep=config.checkpoint.keep
    )
    writes = mesh.world.index == 0
    metrics = Metrics(Path(config.run.dir) / "metrics.jsonl", writes=writes)
    parts = RunParts(
        config,
        mesh,
        plan,
        modules,
        executor,
        optimizer,
        scaler,
        BatchRampup.make(config.train.batch_rampup, config.train.global_batch_size),
        loader,
        valid_loader,
        store,
        metrics,
        state,
    )
    metrics.note(describe(parts, chosen))
    resume(parts)
    return parts


def build_modules(
    config: Config, plan: StagePlan, mesh: Mesh, kernels: Kernels, dtype: torch.dtype
) -> list[GPTStage]:
    """This rank's model chunks, without memory for their parameters yet."""
    modules = []
    for chunk in plan.chunks_of(mesh.pp.index):
        module = GPTStage(
            config.model,
            chunk,
            mesh,
            kernels,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.train.recompute,
            dtype=dtype,
            device="meta",
        )
        modules.append(module)
    return modules


def build_parameters(
    config: Config, modules: list[GPTStage], mesh: Mesh, dtype: torch.dtype
) -> list[Bucket]:
    """Flat buffers for the parameters, filled with their initial values.

    Each parameter is drawn from its own seed and then sliced, so every layout starts with the
    same weights and no rank has to send any.
    """
    buckets = build_buckets(
        modules,
        [module.specs for module in modules],
        mesh,
        dtype=dtype,
        bucket_mb=config.parallel.bucket_mb,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    for bucket in buckets:
        for entry in bucket.entries:
            initialize_parameter(
                entry.param.data,
                entry.spec,
                seed=config.train.seed,
                tp=mesh.tp.size,
                tp_index=mesh.tp.index,
            )
    return buckets


def build_executor(
    config: Config,
    plan: StagePlan,
    modules: list[GPTStage],
    mesh: Mesh,
    dtype: torch.dtype,
    state: TrainState,
) -> PipelineExecutor:
    """The pipeline schedule over this rank's chunks; dropout is seeded before each forward."""
    parallel = config.parallel
    schedule = parallel.schedule
    if schedule == "auto":
        schedule = "interleaved" if parallel.chunks > 1 else "1f1b"
    shards = mesh.tp.size if parallel.sequence_parallel else 1

    def activation_shape(microbatch: MicroBatch) -> tuple[int, ...]:
        batch, seq = microbatch.tokens.shape
        return (seq // shards, batch, config.model.hidden_size)

    def before_forward(chunk: int, microbatch: MicroBatch) -> None:
        modules[chunk].dropout_rng.seed(config.train.seed, state.step, microbatch.index)

    return PipelineExecutor(
        modules,
        plan,
        schedule,
        mesh,
        activation_shape=activation_shape,
        dtype=dtype,
        before_forward=before_forward,
    )


def build_loaders(config: Config, mesh: Mesh) -> tuple[TokenLoader, TokenLoader | None]:
    """Training and, if any is asked for, validation data.

    One rank tokenizes what is not tokenized yet; the others wait for it.
    """
    if mesh.world.index == 0:
        prepare_data(config)
    collectives.barrier(mesh.world)
    data = prepare_data(config)
    train = open_loader(config, data, "train", device=mesh.device)
    if not config.eval.every:
        return train, None
    return train, open_loader(config, data, "valid", device=mesh.device)


def resume(parts: RunParts) -> None:
    """Continue from the run's newest checkpoint, or start from `checkpoint.load`. Collective."""
    config, store = parts.config.checkpoint, parts.store
    newest = store.latest()
    if newest is None and config.load is None:
        parts.optimizer.refresh_masters()
        return
    weights_only = newest is None and config.load_what == "weights"
    kinds = ("param",) if weights_only else parts.optimizer.state_kinds
    wanted = list(parts.optimizer.pieces(only_owned=False, kinds=kinds))
    source = newest if newest is not None else Path(config.load or "")
    loaded = store.load(source, wanted, model=parts.config.model)
    parts.optimizer.publish()
    if not weights_only:
        saved = loaded.state
        parts.optimizer.updates = int(saved["optimizer_updates"])
        parts.scaler.load_state_dict(saved["scaler"])
        parts.state.restore(saved["train"])
    parts.metrics.note(f"loaded {loaded.path}: step {parts.state.step}")


def save(parts: RunParts) -> None:
    """Write a checkpoint of the current step. Collective."""
    parts.store.save(
        parts.state.step,
        parts.optimizer.pieces(only_owned=True),
        state={
            "train": parts.state.to_dict(),
            "scaler": parts.scaler.state_dict(),
            "optimizer_updates": parts.optimizer.updates,
        },
        meta={"model": parts.config.model, "layout": describe_layout(parts)},
    )


def describe_layout(parts: RunParts) -> dict[str, int]:
    """Sizes of the layout, for people; loading does not need them."""
    layout, parallel = parts.mesh.layout, parts.config.parallel
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "chunks": parallel.chunks,
        "zero": parallel.zero,
    }


def describe(parts: RunParts, kernels: dict[str, str]) -> str:
    """One paragraph on what is about to run."""
    config = parts.config
    sizes = " ".join(f"{k}={v}" for k, v in describe_layout(parts).items())
    backends = " ".join(f"{op}={backend}" for op, backend in kernels.items())
    return (
        f"model {config.model.name}: {config.model.num_layers} layers, hidden "
        f"{config.model.hidden_size}, vocabulary {config.model.vocab_size}\n"
        f"layout {sizes} on {parts.mesh.device.type}; layers per stage "
        f"{'-'.join(map(str, parts.plan.split))}; precision {config.precision.name}\n"
        f"kernels {backends}"
    )
