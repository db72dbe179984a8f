"""Does the layout fit the processes there are? Decided before any of them is started. No torch."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

from megads.config.directories import offload_directory
from megads.config.schema import Config
from megads.config.validate import fill_layout
from megads.errors import ConfigError, LayoutError
from megads.launch.machine import Machine
from megads.launch.sbatch import spread
from megads.parallel.layout import ParallelLayout
from megads.train.memory import world_states

PROCESS_BYTES = 350 * 10**6
"""What one worker takes before it holds any model: interpreter, torch, communication buffers."""
TRY_HERE = "model=gpt-tiny parallel=tp2pp2"


def local_layout(config: Config, machine: Machine) -> ParallelLayout:
    """The layout to start on this machine when no launcher started us.

    dp, when it is not given, fills the GPUs; on the CPU it is 1.
    """
    return fill_layout(config, usable_gpus(config, machine))


def usable_gpus(config: Config, machine: Machine) -> int:
    """GPUs that this run may compute on: none when it asks for gloo."""
    return 0 if config.launch.backend == "gloo" else machine.gpus


def check_fits(
    config: Config, layout: ParallelLayout, machine: Machine, arguments: Sequence[str]
) -> None:
    """Raise LayoutError when this machine has too few GPUs for `layout` or too little memory.

    With GPUs each process needs its own; without any, processes share the CPU as long as their
    model states fit. The message says what there is and how the command `arguments` starts
    elsewhere. `config` has passed validation.
    """
    gpus = usable_gpus(config, machine)
    world = layout.world_size
    if gpus and world > gpus:
        has = f"has {gpus} GPU{'s' * (gpus > 1)}"
        raise LayoutError(_refusal(layout, arguments, has, gpus=gpus))
    if gpus:
        return
    if config.launch.backend == "nccl":
        raise LayoutError(_refusal(layout, arguments, "has no GPU", gpus=0))
    states, _ = world_states(config, layout)
    needed = states + world * PROCESS_BYTES
    if machine.free_bytes is not None and needed > machine.free_bytes:
        processes = f"{world} process{'es' * (world > 1)}"
        has = (
            f"has no GPU{' in use (launch.backend=gloo)' * bool(machine.gpus)}, and on its CPU "
            f"{processes} would take about {_gb(needed)} of memory, {_gb(states)} of it for "
            f"weights, gradients and optimizer state of {config.model.name}; "
            f"{_gb(machine.free_bytes)} is free"
        )
        raise LayoutError(_refusal(layout, arguments, has, gpus=0))


def check_disk(config: Config, layout: ParallelLayout) -> None:
    """Raise ConfigError when the directory of state files has no room for those of all ranks.

    It exists. Each rank takes its own space when it starts; here nothing has started yet.
    """
    _, needed = world_states(config, layout)
    if not needed:
        return
    directory = offload_directory(config)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"parallel.offload_path={directory}: the optimizer state of "
            f"{layout.world_size} processes needs {_gb(needed)}, {_gb(free)} is free; give a "
            f"directory on another disk"
        )


def _refusal(layout: ParallelLayout, arguments: Sequence[str], has: str, *, gpus: int) -> str:
    """What the layout needs, what there is, and the commands that start it elsewhere."""
    world = layout.world_size
    nodes, per_node = spread(world)
    given = shlex.join(arguments)
    if nodes == 1:
        torchrun = f"torchrun --standalone --nproc-per-node={per_node}"
    else:
        torchrun = (
            f"torchrun --nnodes={nodes} --nproc-per-node={per_node} "
            "--rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29500"
        )
    srun = f"srun --nodes={nodes} --ntasks-per-node={per_node} --gpus-per-node={per_node} --wait=30"
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
