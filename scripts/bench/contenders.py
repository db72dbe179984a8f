"""The rows of the comparison: one piece of work each, and the commands of all who do it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

MEGADS = "megads"
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc keeps large buffers and uses huge pages, as megads-train arranges for its workers."""


@dataclass(frozen=True)
class Size:
    """The model: GPT-2-like, learned positions, GELU (tanh), biases, tied embeddings."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    seq: int = 512
    vocab: int = 32000


@dataclass(frozen=True)
class Peer:
    """A script beside the peers' README and what it is called with."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    eager: bool = True


@dataclass(frozen=True)
class Row:
    """One piece of work: every contender takes the same number of samples in a step."""

    name: str
    layout: str
    peers: tuple[Peer, ...]
    world: int = 2
    dp: int = 1
    micro_batch: int = 2
    num_microbatches: int = 1
    offload: str = "none"

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.num_microbatches * self.dp


def _torch(script: str, *impls: str) -> tuple[Peer, ...]:
    """Peers of one script that are chosen by --impl; "-compile" in a name is what it says."""
    return tuple(
        Peer(impl, script, ("--impl", impl), eager=not impl.endswith("compile")) for impl in impls
    )


def _megatron_core(*mode: str) -> Peer:
    return Peer("megatron-core", "megatron_peer.py", ("--sdpa", "1", "--mode", *mode))


def _deepspeed(stage: int, offload: str = "none") -> Peer:
    return Peer(f"deepspeed-z{stage}", "ds.py", ("--zero", str(stage), "--offload", offload))


def _offloaded(stage: int, offload: str) -> Row:
    name, layout = f"dp2-z{stage}-{offload}", f"dp2zero{stage}"
    return Row(name, layout, (_deepspeed(stage, offload),), dp=2, offload=offload)


def _pipelines(size: Size) -> tuple[Peer, ...]:
    """Pipeline peers with their best split: the stage that has the head gets fewer blocks."""
    last, edge = max(1, size.layers // 4), max(1, size.layers // 8)
    middle = (size.layers - 2 * edge) // 2
    straight = f"{size.layers - last},{last}"
    v_shape = f"{edge},{middle},{size.layers - 2 * edge - middle},{edge}"
    return (
        Peer(f"1f1b-{straight}", "pp.py", ("--sched", "1f1b", "--split", straight)),
        Peer(f"zbv-{v_shape}", "pp.py", ("--sched", "zbv", "--split", v_shape)),
        _megatron_core("pp", "--last", str(last)),
    )


def rows(size: Size) -> dict[str, Row]:
    """All rows by name."""
    single = _torch("single.py", "nano", "hf", "hf-gelutanh", "nano-compile", "hf-compile")
    zero0 = (*_torch("dp.py", "ddp", "ddp-compile"), _deepspeed(0), _megatron_core("dp"))
    zero1 = (*_torch("dp.py", "zero1"), _deepspeed(1), _megatron_core("dp-dist"))
    zero2 = (*_torch("dp.py", "fsdp2-z2"), _deepspeed(2))
    zero3 = (*_torch("dp.py", "fsdp2"), _deepspeed(3))
    tensor = (
        Peer("dtensor", "tp.py"),
        Peer("dtensor-compile", "tp.py", ("--compile",), eager=False),
        _megatron_core("tp"),
    )
    table = (
        Row("single", "tp1", single, world=1),
        Row("dp2-z0", "dp2", zero0, dp=2),
        Row("dp2-z1", "dp2zero1", zero1, dp=2),
        Row("dp2-z2", "dp2zero2", zero2, dp=2),
        Row("dp2-z3", "dp2zero3", zero3, dp=2),
        *(_offloaded(stage, "cpu") for stage in (1, 2, 3)),
        _offloaded(3, "nvme"),
        Row("tp2", "tp2", tensor),
        Row("pp2", "pp2", _pipelines(size), micro_batch=1, num_microbatches=8),
    )
    return {row.name: row for row in table}


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(bin_dir: Path, *, allocator: bool) -> dict[str, str]:
    """The caller's environment for a CPU run, without the caller's own settings of speed.

    `bin_dir` comes first on PATH; `allocator` adds the settings that megads-train makes by itself.
    """
    dropped = {*ALLOCATOR, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "LD_PRELOAD"}
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env["PATH"] = f"{bin_dir}:{env.get('PATH', '')}"
    env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    return env | (ALLOCATOR if allocator else {})


def peer_command(
    peer: Peer,
    row: Row,
    size: Size,
    *,
    peers_dir: Path,
    bin_dir: Path,
    dtype: str,
    steps: int,
    warmup: int,
    report: Path,
) -> list[str]:
    """How a peer is started; its report, one JSON object, goes to `report`."""
    start = [str(bin_dir / "python")]
    if row.world > 1:
        start = [str(bin_dir / "torchrun"), "--nproc-per-node", str(row.world)]
        start += ["--master-port", str(free_port())]
    options = {
        "layers": size.layers,
        "hidden": size.hidden,
        "heads": size.heads,
        "seq": size.seq,
        "vocab": size.vocab,
        "micro-batch": row.micro_batch,
        "grad-accum": row.num_microbatches,
        "dtype": dtype,
        "steps": steps,
        "warmup": warmup,
        "json": report,
    }
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return [*start, str(peers_dir / peer.script), *peer.args, *flags]


def megads_command(
    executable: Path,
    row: Row,
    size: Size,
    *,
    dtype: str,
    steps: int,
    tokens: Path,
    run_dir: Path,
    overrides: list[str],
) -> list[str]:
    """The real command with the peers' model, batch, optimizer and a constant learning rate."""
    settings = {
        "run.dir": run_dir,
        "model": "gpt-125m",
        "model.name": "bench",
        "model.num_layers": size.layers,
        "model.hidden_size": size.hidden,
        "model.num_attention_heads": size.heads,
        "model.vocab_size": size.vocab,
        "model.max_seq_length": size.seq,
        "model.activation": "gelu_tanh",
        "model.tie_embeddings": "true",
        "parallel": row.layout,
        "parallel.offload": row.offload,
        "precision": dtype,
        "train.steps": steps,
        "train.seq_length": size.seq,
        "train.micro_batch_size": row.micro_batch,
        "train.global_batch_size": row.global_batch,
        "optim": "adamw",
        "optim.lr": 3e-4,
        "optim.betas": "[0.9,0.95]",
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.1,
        "optim.clip": 1.0,
        "optim.schedule": "constant",
        "data.paths": f"[{tokens}]",
        "data.valid_fraction": 0.0,
        "checkpoint.save_last": "false",
        "logging.every": 1,
    }
    return [str(executable), *(f"{key}={value}" for key, value in settings.items()), *overrides]
