"""How a run is operated: checkpoints, reports, and how its processes are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megads.config.fields import (
    NUMBER,
    Duration,
    Factor,
    Group,
    Integer,
    Names,
    NonNegative,
    Positive,
    PositiveFloat,
)
from megads.config.job_fields import JobTime, Line, Lines


class CheckpointConfig(Group):
    """When checkpoints are written and what a run starts from."""

    every: NonNegative = 0
    """Save every this many steps and after the last one; 0 only after the last one."""
    keep: Integer = -1
    """How many of the newest checkpoints stay; -1 all."""
    async_save: bool = True
    """Write in the background: training waits only while the state is copied to host memory."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a save that failed (a full disk) does; the last save of a run always has to succeed."""
    load: str | None = None
    """Checkpoint to start from when run.dir holds none of its own."""
    load_what: Literal["all", "weights", "optimizer"] = "all"
    """What is taken from `load`: optimizer means weights and optimizer, but not the step and the
    position in the data."""
    on_damage: Literal["previous", "stop"] = "previous"
    """What a damaged checkpoint does: take the newest one that is whole, or end the run."""
    save_last: bool = True
    """Save after the last step."""


class LoggingConfig(Group):
    """What is reported and where."""

    every: Positive = 1
    """Steps between lines of metrics.jsonl and of the console."""
    activations: bool = False
    """Measure what forward passes keep for backward ones, which costs a little time."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s, for MFU; None looks the device up."""
    loggers: Names = ()
    """Where else metrics go: wandb, tensorboard, or both."""
    wandb_project: str = "megads"
    wandb_entity: str | None = None
    wandb_name: str | None = None
    """Name of the run there; None: the last part of run.dir."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online if the server answers when the run starts, else files in run.dir to sync."""
    ranks_every: NonNegative = 50
    """Steps between comparisons of the ranks' own times, which name those that are slow; 0 none."""
    slow_factor: Factor = 1.3
    """A rank is slow when its own work takes this many times the median of its peers."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps whose timeline is recorded on all ranks, in run.dir/profile."""
    profile_ranks: tuple[NonNegative, ...] = ()
    """Ranks that record a trace of torch.profiler in those steps too."""


class SlurmConfig(Group):
    """What the sbatch file of `launch=slurm` asks for."""

    nodes: Positive | None = None
    """None: as many as the layout needs at `tasks_per_node`."""
    tasks_per_node: Positive | None = None
    """Workers on a node, one per GPU; None: as many as spread the layout evenly, at most
    `gpus_per_node` or 8."""
    gpus_per_node: NonNegative | None = None
    """None: as many as tasks, with launch.backend=gloo none; 0 for the CPU."""
    cpus_per_task: Positive = 8
    time: JobTime = "24:00:00"
    """Limit of the job, as SLURM writes it; '24:00:00' in quotes in a YAML file."""
    partition: Line | None = None
    account: Line | None = None
    job_name: Line = "megads"
    container_image: Line | None = None
    """Image for srun's --container-image (pyxis), in which the directory of the submission is
    mounted; files are then not looked for before the submission. None: no container."""
    container_mounts: Line | None = None
    """More mounts, as in `/data:/data`."""
    signal_s: Annotated[int, Field(ge=1, le=65535), NUMBER] = 300
    """Seconds before the limit at which the run is told to save and leave."""
    requeue: bool = True
    """Whether a job that saved and left goes back into the queue."""
    setup: Lines = ()
    """Shell lines before the start: modules to load, an environment to enter."""
    options: Lines = ()
    """More options of sbatch, as in `--exclusive` or `--qos high`."""


class LaunchConfig(Group):
    """How worker processes are set up."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    timeout_s: PositiveFloat = 600.0
    """A job that hangs ends within this time: ranks wait for others for 0.8 of it, and a rank's own
    work may make no progress for 0.5."""
    tune_allocator: bool = True
    """On CPU, let glibc keep large buffers; variables that are already set are left alone."""
    threads: Positive | None = None
    """CPU threads per worker; None: cores / workers."""
    stop_after: Duration | None = None
    """Time after which the run saves and ends with status 3, counted from its start: seconds, or
    text like 90m or 3h50m."""
    max_restarts: NonNegative = 0
    """How often a job that fails is started again from its newest checkpoint."""
    where: Literal["here", "slurm"] = "here"
    """slurm: write an sbatch file into run.dir and submit it, instead of starting workers."""
    submit: bool = True
    """With where=slurm, whether to submit the file or only to show it."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
