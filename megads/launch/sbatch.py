"""The sbatch file of `launch=slurm`: what the job asks for, and the text. Pure but for a template.

The file ends like `scripts/slurm/train.sbatch`, of which the part below the marked line does the
work: start the tasks, start again what fails, put the job back into the queue when it was stopped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import megads
from megads.config.job_fields import job_seconds
from megads.config.operation import SlurmConfig
from megads.config.schema import Config
from megads.config.validate import fill_layout
from megads.errors import ConfigError, LayoutError

GPUS_PER_NODE = 8
SCRIPT = "train.sbatch"
MARK = "# ---- From here on"
FOR_THE_SUBMISSION = ("launch.submit=", "launch.slurm.")
"""Settings that mean nothing in the job."""


@dataclass(frozen=True)
class JobShape:
    """How many nodes a job takes, and what of each; `gpus_per_node` 0 for the CPU."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.tasks_per_node


def spread(world_size: int, most: int = GPUS_PER_NODE) -> tuple[int, int]:
    """Nodes, and workers on each: evenly, over as few nodes as that allows with `most` on one."""
    per_node = max(n for n in range(1, most + 1) if world_size % n == 0)
    return world_size // per_node, per_node


def job_shape(config: Config) -> JobShape:
    """The nodes and tasks that `launch.slurm` and the layout ask for.

    Where `parallel.dp` is not given and `launch.slurm.nodes` is, dp fills the nodes. Raises
    LayoutError when the layout cannot be spread evenly over the nodes, and ConfigError when the
    tasks cannot have their GPUs or the job its time.
    """
    slurm = config.launch.slurm
    nodes, tasks = slurm.nodes, slurm.tasks_per_node
    most = slurm.gpus_per_node or GPUS_PER_NODE
    if config.parallel.dp is None and nodes is not None:
        tasks = tasks or most
        world = fill_layout(config, nodes * tasks).world_size
    else:
        world = fill_layout(config, 1).world_size
    if nodes is None and tasks is None:
        nodes, tasks = spread(world, most)
    elif tasks is None:
        assert nodes is not None
        tasks = max(1, world // nodes)
    elif nodes is None:
        nodes = max(1, world // tasks)
    if nodes * tasks != world:
        raise LayoutError(_uneven(config, world, nodes, tasks))
    gpus = slurm.gpus_per_node
    if gpus is None:
        gpus = 0 if config.launch.backend == "gloo" else tasks
    shape = JobShape(nodes, tasks, gpus)
    if problems := list(_problems(config, shape)):
        raise ConfigError(problems)
    return shape


def render(
    config: Config, shape: JobShape, arguments: Sequence[str], programs: Path | None = None
) -> str:
    """The sbatch file that runs `megads-train *arguments` in a job of this shape.

    `arguments` are a user's, and in the job they start no other job. `programs` is where
    megads-train is, for the job's PATH. What SLURM writes goes to a file in `run.dir`.
    """
    marked = template().index(MARK)
    words = map(shlex.quote, job_arguments(config, shape, arguments))
    lines = [
        "#!/bin/bash",
        "# Written by megads-train launch=slurm; sbatch with this file submits the run again.",
        f"# What SLURM writes needs its folder: mkdir -p {shlex.quote(config.run.dir)}",
        *(f"#SBATCH {option}" for option in _options(config, shape)),
        f"srun_options=({' '.join(_container(config.launch.slurm))})",
        *_preparations(config, programs),
        " \\\n    ".join(["set --", *words]),
        "",
    ]
    return "\n".join(lines) + "\n" + template()[marked:]


def template() -> str:
    """The script that is shipped with megads: inside the installed package, or in a checkout."""
    package = Path(megads.__file__).parent
    for directory in (package, package.parent):
        file = directory / "scripts" / "slurm" / SCRIPT
        if file.is_file():
            return file.read_text()
    raise ConfigError(f"scripts/slurm/{SCRIPT} is missing from the installation at {package}")


def job_arguments(config: Config, shape: JobShape, arguments: Sequence[str]) -> list[str]:
    """What the file passes on of a user's arguments, with what has to be said beside them."""
    restarts = f"launch.max_restarts={config.launch.max_restarts}"
    said = {"launch.max_restarts": restarts} if config.launch.max_restarts else {}
    if shape.gpus_per_node == 0:
        said["launch.backend"] = "launch.backend=gloo"
    if shape.world_size == 1:  # one task starts as many workers as it has GPUs
        said["parallel.dp"] = "parallel.dp=1"
    kept = [a for a in arguments if a.lstrip("+").partition("=")[0] not in said]
    return [a for a in kept if not a.startswith(FOR_THE_SUBMISSION)] + list(said.values())


def _uneven(config: Config, world: int, nodes: int, tasks: int) -> str:
    parallel = config.parallel
    sizes = f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp}"
    sizes += "" if parallel.dp is None else f" x parallel.dp={parallel.dp}"
    slurm = config.launch.slurm
    given = " and ".join(
        f"launch.slurm.{key}={value}"
        for key, value in (("nodes", slurm.nodes), ("tasks_per_node", slurm.tasks_per_node))
        if value is not None
    )
    even, per_node = spread(world, slurm.gpus_per_node or GPUS_PER_NODE)
    return (
        f"{sizes} makes {world} processes, which {given} cannot hold evenly: it would be "
        f"{nodes} node{'s' * (nodes > 1)} with {tasks} each; for example "
        f"launch.slurm.nodes={even} launch.slurm.tasks_per_node={per_node}"
    )


def _problems(config: Config, shape: JobShape) -> Iterator[str]:
    slurm, backend = config.launch.slurm, config.launch.backend
    gpus, tasks = shape.gpus_per_node, shape.tasks_per_node
    if gpus == 0 and backend == "nccl":
        yield "launch.slurm.gpus_per_node=0 is for the CPU, launch.backend=nccl for GPUs"
    if gpus and backend == "gloo":
        yield (
            f"launch.backend=gloo computes on the CPU; launch.slurm.gpus_per_node={gpus} would "
            f"take GPUs that nobody uses, so leave it out"
        )
    if 0 < gpus < tasks:
        yield (
            f"launch.slurm.gpus_per_node={gpus} is less than {tasks} tasks on a node, which need "
            f"a GPU each; set launch.slurm.tasks_per_node={gpus}, or gpus_per_node=0 for the CPU"
        )
    limit_s = job_seconds(slurm.time) or math.inf
    if slurm.signal_s >= limit_s:
        yield (
            f"launch.slurm.signal_s={slurm.signal_s} would stop the run as soon as it starts: "
            f"launch.slurm.time={slurm.time} is {limit_s:.0f} s"
        )
    for option in slurm.options:
        if not option.startswith("-"):
            yield f"launch.slurm.options: {option} is no option of sbatch; write it as --name value"
    if slurm.container_mounts is not None and slurm.container_image is None:
        yield "launch.slurm.container_mounts needs launch.slurm.container_image"


def _options(config: Config, shape: JobShape) -> Iterator[str]:
    """What follows #SBATCH, in order."""
    slurm = config.launch.slurm
    yield f"--job-name={shlex.quote(slurm.job_name)}"
    yield f"--nodes={shape.nodes}"
    yield f"--ntasks-per-node={shape.tasks_per_node}"
    if shape.gpus_per_node:
        yield f"--gpus-per-node={shape.gpus_per_node}"
    yield f"--cpus-per-task={slurm.cpus_per_task}"
    yield f"--time={slurm.time}"
    if slurm.partition is not None:
        yield f"--partition={shlex.quote(slurm.partition)}"
    if slurm.account is not None:
        yield f"--account={shlex.quote(slurm.account)}"
    directory = config.run.dir.replace("%", "%%")
    yield f"--output={shlex.quote(f'{directory}/slurm-%j.out')}"
    yield "--open-mode=append"
    yield f"--signal=USR1@{slurm.signal_s}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield from slurm.options


def _container(slurm: SlurmConfig) -> Iterator[str]:
    """Options of srun, as words of the shell. The job's directory is in the container too."""
    if slurm.container_image is None:
        return
    mounts = "" if slurm.container_mounts is None else "," + shlex.quote(slurm.container_mounts)
    yield f"--container-image={shlex.quote(slurm.container_image)}"
    yield f'--container-mounts="$PWD:$PWD"{mounts}'
    yield '--container-workdir="$PWD"'


def _preparations(config: Config, programs: Path | None) -> Iterator[str]:
    if programs is not None and config.launch.slurm.container_image is None:
        yield f"PATH={shlex.quote(str(programs))}:$PATH"
    if config.launch.threads is not None:
        yield f"export OMP_NUM_THREADS={config.launch.threads}"
    yield from config.launch.slurm.setup
