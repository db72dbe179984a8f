"""Does the layout fit the processes there are? Decided before any of them is started. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megads.config.schema import Config, ParallelConfig
from megads.errors import LayoutError
from megads.launch.env import RankInfo
from megads.launch.machine import Machine
from megads.models.flops import state_bytes
from megads.parallel.layout import ParallelLayout

PROCESS_BYTES = 350 * 10**6
"""What one worker takes before it holds any model: interpreter, torch, communication buffers."""
GPUS_PER_NODE = 8
TRY_HERE = "model=gpt-tiny parallel=tp2pp2"


def layout_for(parallel: ParallelConfig, world_size: int) -> ParallelLayout:
    """The layout on `world_size` processes; dp, when not given, takes what tp and pp leave.

    Raises LayoutError when the sizes do not multiply to the world size.
    """
    model = parallel.tp * parallel.pp
    dp = parallel.dp or max(1, world_size // model)
    layout = ParallelLayout(tp=parallel.tp, pp=parallel.pp, dp=dp)
    if layout.world_size != world_size:
        sizes = f"tp={parallel.tp} x pp={parallel.pp}" + (f" x dp={dp}" if parallel.dp else "")
        needs = f"a multiple of {model}" if parallel.dp is None else str(layout.world_size)
        raise LayoutError(
            f"parallel: {sizes} needs {needs} processes, but the job has {world_size}; "
            f"start {needs}, or change parallel.tp, parallel.pp or parallel.dp"
        )
    return layout


def check_world(config: Config, info: RankInfo) -> ParallelLayout:
    """The layout of a job that a launcher started; raises LayoutError when its size is wrong."""
    return layout_for(config.parallel, info.world_size)


def local_layout(config: Config, machine: Machine, arguments: Sequence[str]) -> ParallelLayout:
    """The layout to start on this machine, where no launcher started us.

    On GPUs one process each, dp filling them when it is not given; without any, as many processes
    on the CPU as the layout has. Raises LayoutError, which says what there is and how to start the
    same command elsewhere, when there are too few GPUs or too little memory.
    """
    parallel = config.parallel
    gpus = 0 if config.launch.backend == "gloo" else machine.gpus
    model = parallel.tp * parallel.pp
    dp = parallel.dp or max(1, gpus // model)
    layout = ParallelLayout(tp=parallel.tp, pp=parallel.pp, dp=dp)
    if gpus:
        if layout.world_size > gpus:
            has = f"has {gpus} GPU{'s' * (gpus > 1)}"
            raise LayoutError(_refusal(layout, arguments, has, gpus=gpus))
        return layout
    states = state_bytes(config, layout) * layout.world_size
    needed = states + layout.world_size * PROCESS_BYTES
    if machine.free_bytes is not None and needed > machine.free_bytes:
        processes = f"{layout.world_size} process{'es' * (layout.world_size > 1)}"
        has = (
            f"has no GPU, and on its CPU {processes} would take about {_gb(needed)} of memory "
            f"({_gb(states)} for weights, gradients and optimizer state of {config.model.name}) "
            f"of which {_gb(machine.free_bytes)} is free"
        )
        raise LayoutError(_refusal(layout, arguments, has, gpus=0))
    return layout


def _refusal(layout: ParallelLayout, arguments: Sequence[str], has: str, *, gpus: int) -> str:
    """What the layout needs, what there is, and the commands that start it elsewhere."""
    world = layout.world_size
    per_node = min(world, GPUS_PER_NODE)
    nodes = -(-world // per_node)
    if world % per_node:  # No even spread over full nodes: as many nodes as divide the world.
        per_node = max(n for n in range(1, per_node + 1) if world % n == 0)
        nodes = world // per_node
    given = shlex.join(arguments)
    if nodes == 1:
        torchrun = f"torchrun --standalone --nproc-per-node={per_node}"
    else:
        torchrun = (
            f"torchrun --nnodes={nodes} --nproc-per-node={per_node} "
            "--rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29500"
        )
    srun = f"srun --nodes={nodes} --ntasks-per-node={per_node} --gpus-per-node={per_node}"
    lines = [
        f"parallel: tp={layout.tp} x pp={layout.pp} x dp={layout.dp} needs {world} "
        f"device{'s' * (world > 1)}; this machine {has}.",
        f"Start it with torchrun, on each of {nodes} nodes with {per_node} GPUs:"
        if nodes > 1
        else f"Start it with torchrun, on a machine with {per_node} GPU{'s' * (per_node > 1)}:",
        f"    {torchrun} -m megads.cli.train {given}".rstrip(),
        "or under SLURM:",
        f"    {srun} megads-train {given}".rstrip(),
        "To see the same code train here, take a smaller model"
        + (", on the CPU:" if gpus else ":"),
        f"    megads-train {TRY_HERE}" + (" launch.backend=gloo" if gpus else ""),
    ]
    return "\n".join(lines)


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 100e9 else f"{size / 1e9:,.0f} GB"
