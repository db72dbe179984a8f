"""The typed form of a run's configuration.

Hydra composes YAML into one nested mapping; `Config` is that mapping decoded once, frozen, with
unknown keys refused. Everything below reads these objects and nothing reads the YAML again.
Checks that involve a single field or a single group live here; checks across groups (heads
against tensor parallel size, batch against data parallel size, files that must exist) live in
`megads.config.validate`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megads.config.fields import (
    NUMBER,
    Factor,
    Fraction,
    Group,
    Names,
    NonNegative,
    NonNegativeFloat,
    Paths,
    PerSource,
    Positive,
    PositiveFloat,
)
from megads.config.model import ModelConfig
from megads.config.operation import CheckpointConfig, LaunchConfig, LoggingConfig


class ParallelConfig(Group):
    """Sizes of the parallel axes and what is sharded over them."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive | None = None
    """Data parallel size; None takes what the world size leaves: world / (tp x pp)."""
    chunks: Positive = 1
    """Model chunks (virtual stages) per pipeline stage; above 1 the schedule is interleaved."""
    zero: Annotated[int, Field(ge=0, le=3), NUMBER] = 0
    sequence_parallel: bool = False
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved"] = "auto"
    """auto: 1f1b, or interleaved when chunks > 1."""
    split: tuple[NonNegative, ...] | None = None
    """Layers of each virtual stage in model order; None balances them by estimated cost."""
    zero_shard_size: Positive | None = None
    """Data-parallel neighbours that a ZeRO stage shards over (those of one node, say); other such
    groups hold copies. None: all data-parallel ranks."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where a rank keeps optimizer state, master weights and summed gradients: on the device, in
    host memory, or (gradients in host memory) in a file. Under stage 3 the parameters too."""
    offload_path: str | None = None
    """Directory on a local disk for `offload=nvme`; None: run.dir."""
    offload_budget_mb: PositiveFloat = 512.0
    """Host memory in MiB of each rank through which `offload=nvme` streams its state."""
    bucket_mb: PositiveFloat = 32.0
    """Size of a gradient bucket in MiB: the unit of data-parallel communication."""


class TrainConfig(Group):
    """How long, how much at a time and from which seed."""

    steps: NonNegative = 100
    seed: NonNegative = 1234
    seq_length: Positive = 1024
    micro_batch_size: Positive = 1
    global_batch_size: Positive = 8
    batch_rampup: tuple[Positive, Positive, Positive] | None = None
    """(start, increment, samples): begin with global batch `start`, grow by `increment` in equal
    shares of `samples` until `global_batch_size` is reached."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: the attention core, or whole blocks."""
    recompute_layers: NonNegative | None = None
    """With recompute=full, how many blocks of each model chunk, the first ones; None all."""
    offload_activations: bool = False
    """Keep what blocks save for backward in host memory meanwhile; with recompute=full that is
    each block's input alone."""
    nonfinite: Literal["skip", "stop", "rewind"] = "stop"
    """What a non-finite loss or gradient norm does: leave the update out, end the run, or go back
    to a checkpoint and leave out the samples. fp16 overflows are always skipped."""
    spike: Literal["off", "skip", "stop", "rewind"] = "off"
    """What a spike of the loss or the gradient norm does; off: nothing is a spike."""
    spike_loss: Factor | None = 2.0
    """A loss above this many times the median of the last good steps is a spike; None: none is."""
    spike_norm: Factor | None = 10.0
    """The same of the gradient norm."""
    spike_window: Positive = 20
    """Good steps that the medians are taken over; before there are so many nothing is a spike. With
    spike=skip, as many spikes in a row end the run."""
    rewind_skip: Positive = 1
    """Global batches that a rewind leaves out, the last of them that of the bad step. The run goes
    back to the newest checkpoint from before the first of them."""
    max_rewinds: NonNegative = 3
    """Rewinds in the life of a run; the next bad step after them ends it."""


class EvalConfig(Group):
    """Evaluation during training."""

    every: NonNegative = 0
    """Evaluate every this many steps and after the last one; 0 never."""
    steps: Positive = 10
    """Global batches per evaluation."""


class OptimConfig(Group):
    """Optimizer and learning rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: NonNegativeFloat = 3e-4
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.1
    decay_embeddings: bool = True
    """Weight decay applies to matrices and, with this, embeddings; never to biases and norms."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Fraction = 0.0
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    units: Literal["steps", "samples"] = "steps"
    """What warmup, decay and total are counted in."""
    warmup: NonNegative = 0
    total: Positive | None = None
    """Where the schedule reaches min_lr; None: the end of the run."""
    decay: NonNegative = 0
    """Length of the final decay of the wsd schedule."""


class PrecisionConfig(Group):
    """Number formats. Gradients are always accumulated and reduced in fp32."""

    name: Literal["fp32", "bf16", "fp16"] = "fp32"
    initial_loss_scale: PositiveFloat = 65536.0
    loss_scale_window: Positive = 1000
    """Steps without overflow after which the fp16 loss scale doubles."""
    min_loss_scale: PositiveFloat = 1.0


KernelBackend = Literal["auto", "reference", "torch", "compiled"]
COMPILED_OPERATIONS = ("norm", "activation", "rotary", "residual")
"""The ops that the `compiled` backend has; the others have all of them."""


class KernelsConfig(Group):
    """Backend of each op of the block; `auto` takes torch's, the fastest in the sum on a CPU."""

    name: KernelBackend = "auto"
    """Of all ops; those that the backend does not have are chosen as by `auto`."""
    norm: KernelBackend = "auto"
    activation: KernelBackend = "auto"
    rotary: KernelBackend = "auto"
    attention: KernelBackend = "auto"
    residual: KernelBackend = "auto"
    cross_entropy: KernelBackend = "auto"
    optimizer: KernelBackend = "auto"


class DataConfig(Group):
    """What is trained on."""

    source: Literal["files", "streaming"] = "files"
    """files: token files, and texts tokenized beforehand. streaming: JSON lines, texts, Parquet
    files or `hf:NAME[:CONFIG][@SPLIT]`, read and tokenized while training."""
    paths: Paths = ()
    """Prefixes of .bin/.idx pairs, or texts (.txt, .jsonl, .json, .parquet, .gz, .zst), which are
    tokenized into run.dir first."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """Share of each path in the blend; None: by size."""
    epochs: PerSource[PositiveFloat] = None
    """Most epochs that each path may give, or one number for every path; None: no limit."""
    limits: PerSource[Positive] = None
    """Most samples that each path may give, or one number for every path; None: no limit."""
    skip: tuple[tuple[NonNegative, NonNegative], ...] = ()
    """Ranges [first, after) of positions in the run's stream of samples that are not read."""
    valid_fraction: Fraction = 0.02
    """Last share of each source's documents or tokens, kept for evaluation."""
    valid_paths: Paths = ()
    """Other files for evaluation, whole; each is a set with a loss of its own."""
    valid_names: Names = ()
    """What the sets are called in reports, in the order of their paths; (): after their files."""
    tokenizer: str = "byte"
    """`byte`, `tiktoken:NAME`, or the path of a sentencepiece .model, a Hugging Face tokenizer.json
    or a .tiktoken file, or of the folder that holds one."""
    append_eod: bool = True
    document_mask: bool = False
    """Attention and positions stay inside documents, and no document's last token is asked for the
    first of the next; off, a sample is read as one text."""
    text_key: str = "text"
    """Where JSON lines, tables and streamed records hold their text."""
    lanes: Positive | None = None
    """Parts that a stream is dealt to, each with a place of its own: a multiple of dp that divides
    every batch, fixed for the life of a run. None: 8, or as much of it as divides the batch."""
    shuffle_buffer: NonNegative = 0
    """Documents of a lane that are shuffled with each other, block by block; 0 or 1 not at all."""


class RunConfig(Group):
    """The run itself."""

    dir: str = "runs/${model.name}"
    """Where everything of a run goes."""


class Config(Group):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    eval: EvalConfig
    optim: OptimConfig
    precision: PrecisionConfig
    kernels: KernelsConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig
