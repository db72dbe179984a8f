"""The only wiring file: from a configuration to everything a run needs, in one fixed order."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.checkpoint.store import CheckpointStore
from megads.config.directories import offload_directory
from megads.config.rampup import BatchRampup
from megads.config.schema import Config
from megads.config.validate import resolve_layout
from megads.data.ledger import DataLedger, Rewind
from megads.data.loader import TokenLoader
from megads.data.streaming import StreamLoader
from megads.kernels.api import Kernels, select_kernels
from megads.launch.activity import Activity
from megads.launch.env import RankInfo
from megads.launch.watchdog import WAITING_SHARE
from megads.models.families import param_count
from megads.models.gpt import GPTStage
from megads.models.init import initialize_parameter
from megads.models.saved import SavedTensors
from megads.optim.lr import learning_rate
from megads.optim.scaler import LossScaler
from megads.optim.update import make_update_rule
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import BatchPlan
from megads.parallel.mesh import Mesh
from megads.pipeline.executor import PipelineExecutor
from megads.pipeline.partition import StagePlan, plan_stages
from megads.train.data import build_loaders, start_ledger
from megads.train.guard import Guard
from megads.train.memory import bucket_numel, offload_budget, require_room, shard_size
from megads.train.memory_use import MemoryUse
from megads.train.metrics import Metrics
from megads.train.state import TrainState
from megads.train.timing import StepTimer
from megads.zero.buckets import Entry, build_buckets
from megads.zero.optimizer import ZeroOptimizer
from megads.zero.shards import Offload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class RunParts:
    """What `build` made. `modules`: this rank's model chunks; `rewinds`: those made so far."""

    config: Config
    mesh: Mesh
    plan: StagePlan
    modules: list[GPTStage]
    executor: PipelineExecutor
    saved: SavedTensors
    optimizer: ZeroOptimizer
    scaler: LossScaler
    guard: Guard
    rewinds: list[Rewind]
    rampup: BatchRampup
    loader: TokenLoader | StreamLoader
    valid_loader: TokenLoader | None
    ledger: DataLedger
    store: CheckpointStore
    metrics: Metrics
    timer: StepTimer
    memory: MemoryUse
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

    def microbatches(self, batch: BatchPlan) -> list[MicroBatch]:
        """This rank's part of the global batch that comes next."""
        return self.loader.batches(
            self.state.samples,
            batch.global_batch_size,
            batch.micro_batch_size,
            batch.dp,
            self.mesh.dp.index,
        )

    @property
    def layout_sizes(self) -> dict[str, int]:
        """Sizes of the layout, for people; loading does not need them."""
        layout, parallel = self.mesh.layout, self.config.parallel
        return {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.dp,
            "chunks": parallel.chunks,
            "zero": parallel.zero,
        }

    def close(self) -> None:
        """Give up everything outside of memory. All ranks, once nothing is under way any more."""
        self.optimizer.close()
        self.mesh.close()

    def describe(self, backends: dict[str, str]) -> str:
        """A few lines on what is about to run; `backends` says who computes each op."""
        model, split = self.config.model, "-".join(map(str, self.plan.split))
        return (
            f"model {model.name}: {param_count(model) / 1e6:.3g} M parameters, {model.num_layers} "
            f"layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}\n"
            f"layout {_pairs(self.layout_sizes)} on {self.mesh.device.type}; layers per stage "
            f"{split}; precision {self.config.precision.name}\n"
            f"kernels {_pairs(backends)}"
        )


def _pairs(values: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def build(config: Config, info: RankInfo, activity: Activity | None = None) -> RunParts:
    """Make everything of a run, at step 0 with its initial weights. Collective.

    `activity` is told what this rank does once training has begun.
    The process group must have been started. Raises ConfigError, LayoutError for more than a GPU
    can hold, or DataError for data that does not suit the model.
    """
    layout = resolve_layout(config, info.world_size)
    mesh = Mesh.build(
        layout,
        info.rank,
        num_kv_heads=config.model.num_kv_heads,
        zero_shard_size=shard_size(config, layout.dp),
        device=info.device,
        timeout_s=WAITING_SHARE * config.launch.timeout_s,
        ring=config.parallel.chunks > 1,
    )
    if mesh.device.type == "cuda":
        require_room(config, layout, mesh.coords.pp, torch.cuda.mem_get_info(mesh.device)[1])
    parallel, dtype = config.parallel, DTYPES[config.precision.name]
    plan = plan_stages(
        config.model, layout.pp, parallel.chunks, config.train.seq_length, split=parallel.split
    )
    kernels, backends = select_kernels(config.kernels, mesh.device, dtype)
    saved = SavedTensors(
        counts=config.logging.activations, offloads=config.train.offload_activations
    )
    modules = build_modules(config, plan, mesh, kernels, dtype, saved)
    optimizer = build_optimizer(config, modules, mesh, kernels, dtype)
    # No rng is built: dropout, like initial weights, is seeded by where it happens.
    state = TrainState(run_id=collectives.broadcast_object(secrets.token_hex(4), mesh.world))
    executor = build_executor(config, plan, modules, mesh, dtype, state)
    loader, valid_loader = build_loaders(config, mesh)
    run_dir, is_first = Path(config.run.dir), mesh.world.index == 0
    run_dir.mkdir(parents=True, exist_ok=True)
    parts = RunParts(
        config=config,
        mesh=mesh,
        plan=plan,
        modules=modules,
        executor=executor,
        saved=saved,
        optimizer=optimizer,
        scaler=LossScaler(config.precision),
        guard=Guard(config.train),
        rewinds=[],
        rampup=BatchRampup.make(config.train.batch_rampup, config.train.global_batch_size),
        loader=loader,
        valid_loader=valid_loader,
        ledger=start_ledger(config, mesh.world),
        store=CheckpointStore(
            run_dir / "checkpoints", mesh.world, saving=mesh.saving, keep=config.checkpoint.keep
        ),
        metrics=Metrics.of_run(config, state) if is_first else Metrics(None),
        timer=StepTimer(config.logging, mesh, run_dir, activity),
        memory=MemoryUse(optimizer, modules, saved, mesh),
        state=state,
    )
    parts.metrics.note(parts.describe(backends))
    return parts


def build_modules(
    config: Config,
    plan: StagePlan,
    mesh: Mesh,
    kernels: Kernels,
    dtype: torch.dtype,
    saved: SavedTensors,
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
            recompute_layers=config.train.recompute_layers,
            saved=saved,
            dtype=dtype,
            device="meta",
        )
        modules.append(module)
    return modules


def build_optimizer(
    config: Config,
    modules: list[GPTStage],
    mesh: Mesh,
    kernels: Kernels,
    dtype: torch.dtype,
) -> ZeroOptimizer:
    """Flat buffers for the parameters, with their initial values, and the optimizer over them.

    Each parameter is drawn from its own seed and then sliced, so every layout starts with the
    same weights and no rank has to send any.
    """
    parallel = config.parallel
    buckets = build_buckets(
        modules,
        mesh,
        dtype=dtype,
        bucket_numel=bucket_numel(config),
        sequence_parallel=parallel.sequence_parallel,
    )

    def initialize(entry: Entry) -> None:
        initialize_parameter(
            entry.param.data,
            entry.spec,
            seed=config.train.seed,
            tp=mesh.tp.size,
            tp_index=mesh.tp.index,
        )

    return ZeroOptimizer(
        modules,
        buckets,
        mesh,
        make_update_rule(config.optim, kernels.adamw),
        config.optim,
        stage=parallel.zero,
        initialize=initialize,
        offload=Offload(
            parallel.offload,
            offload_directory(config),
            offload_budget(config),
        ),
    )


def build_executor(
    config: Config,
    plan: StagePlan,
    modules: list[GPTStage],
    mesh: Mesh,
    dtype: torch.dtype,
    state: TrainState,
) -> PipelineExecutor:
    """The pipeline schedule over this rank's chunks; dropout is seeded before each forward."""
    shards = mesh.tp.size if config.parallel.sequence_parallel else 1

    def activation_shape(microbatch: MicroBatch) -> tuple[int, ...]:
        batch, seq = microbatch.tokens.shape
        return (batch * seq // shards, config.model.hidden_size)

    def before_forward(chunk: int, microbatch: MicroBatch) -> None:
        modules[chunk].dropout_rng.seed(config.train.seed, state.step, microbatch.index)

    return PipelineExecutor(
        modules,
        plan,
        config.parallel.schedule,
        mesh,
        activation_shape=activation_shape,
        dtype=dtype,
        before_forward=before_forward,
    )
