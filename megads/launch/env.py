"""The process environment: the one file that reads or writes `os.environ`.

Who this process is among all of the job comes from torchrun's variables, from SLURM's, or, when
there are neither, from nowhere: then the command is the one the user typed, and starts workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megads.errors import LayoutError
from megads.launch.machine import Machine, core_count, free_memory, gpu_count, torch_has_cuda
from megads.launch.slurm import first_host, master_port

Launcher = Literal["local", "torchrun", "slurm"]
Backend = Literal["gloo", "nccl"]
BackendChoice = Literal["auto", "gloo", "nccl"]

LAUNCHER_PID = "MEGADS_LAUNCHER_PID"
"""Set by the local launcher for its workers: they end when that process does."""
JOB_STARTED = "MEGADS_JOB_STARTED"
"""When the local launcher started, in seconds since the epoch; restarts do not change it."""


@dataclass(frozen=True)
class RankInfo:
    """One process's place in the job, and where to meet the others.

    `node` is the index of the machine; `device` is "cpu" or "cuda:i"; `how` says who started the
    process, `job` what for: the same for all processes of a job. `may_restart`: the launcher may
    start them all again.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    device: str
    backend: Backend
    master_addr: str
    master_port: int
    how: Launcher
    job: str = "a job"
    may_restart: bool = False

    @property
    def init_method(self) -> str:
        """For `torch.distributed.init_process_group`: launchers made by torch keep a store."""
        return f"tcp://{self.master_addr}:{self.master_port}" if self.how == "slurm" else "env://"


@dataclass(frozen=True)
class Started:
    """What a process knows of its start before it has read its configuration.

    `launcher_pid` is set when megads-train itself started it; `error_file` is where torch's
    elastic agent expects the description of a failure; `job_started` is in seconds since the epoch.
    """

    rank: int
    local_rank: int
    launcher_pid: int | None = None
    error_file: Path | None = None
    job_started: float = field(default_factory=time.time, compare=False)


def started(environ: Mapping[str, str] | None = None) -> Started | None:
    """How a launcher started this process; None when none did."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launcher, file = environ.get(LAUNCHER_PID), environ.get("TORCHELASTIC_ERROR_FILE")
        return Started(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            launcher_pid=int(launcher) if launcher else None,
            error_file=Path(file) if file else None,
            job_started=float(environ.get(JOB_STARTED) or time.time()),
        )
    # One task needs no launcher, and an interactive shell under srun looks just like one task.
    if int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return Started(int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"]))
    return None


def rank_info(
    backend: BackendChoice = "auto", environ: Mapping[str, str] | None = None
) -> RankInfo | None:
    """This process's place in a running job; None when no launcher started it.

    `environ` stands in for the process environment in tests. Raises LayoutError when a launcher's
    variables are incomplete or there are fewer GPUs than local ranks.
    """
    environ = os.environ if environ is None else environ
    if started(environ) is None:
        return None
    by_torchrun = "RANK" in environ and "WORLD_SIZE" in environ
    return (_from_torchrun if by_torchrun else _from_slurm)(environ, backend)


def this_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """What processes started here may use. GPUs count only if torch was built for them."""
    environ = os.environ if environ is None else environ
    gpus = gpu_count(environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(
        gpus=gpus if gpus and torch_has_cuda() else 0,
        cores=core_count(),
        free_bytes=free_memory(),
    )


def worker_environment(
    *,
    threads: int | None,
    tune_allocator: bool,
    on_cpu: bool,
    workers: int,
    cores: int,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables that workers started on this machine get beside those it has already.

    What each worker computes on the CPU (all of it, or offloaded updates) takes its share of the
    cores. Without a GPU the C library keeps large buffers instead of giving them back to the kernel
    after every step, and gloo stays on the loopback interface. What the user has set is never in
    the result, except that an explicit `threads` (launch.threads) is stronger than OMP_NUM_THREADS.
    """
    environ = os.environ if environ is None else environ
    wanted = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, cores // workers))}
    if on_cpu:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
        if tune_allocator:
            wanted["MALLOC_MMAP_THRESHOLD_"] = str(4 * 2**30)
            wanted["MALLOC_TRIM_THRESHOLD_"] = str(64 * 2**30)
            wanted["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    if not Path("/sys/class/net/lo").exists():
        wanted.pop("GLOO_SOCKET_IFNAME", None)
    added = {name: value for name, value in wanted.items() if name not in environ}
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)
    added[LAUNCHER_PID], added[JOB_STARTED] = str(os.getpid()), str(time.time())
    return added


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with these variables, for a process to be started."""
    return {**os.environ, **variables}


def variables(prefix: str) -> dict[str, str]:
    """What the user has set in the environment for a library, by the beginning of the names."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def launcher_pid() -> int | None:
    """The process that `worker_environment` was made in; None when none was."""
    pid = os.environ.get(LAUNCHER_PID)
    return int(pid) if pid else None


def become_worker(
    rank: int, world_size: int, addr: str, port: int, error_file: Path, supervisor: int
) -> None:
    """Make this process, forked by process `supervisor`, a worker: it gets torchrun's variables.

    The supervisor listens at `addr`:`port` with the store in which the workers meet.
    """
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            LAUNCHER_PID: str(supervisor),
        }
    )


def _from_torchrun(environ: Mapping[str, str], backend: BackendChoice) -> RankInfo:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in environ]:
        raise LayoutError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not; start with torchrun, which sets them "
            "all, or unset RANK and WORLD_SIZE to let megads-train start its workers"
        )
    world_size, local_rank = int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    device, chosen = _device(environ, backend, local_rank, local_world_size)
    return RankInfo(
        rank=int(environ["RANK"]),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=int(environ.get("GROUP_RANK", int(environ["RANK"]) // local_world_size)),
        device=device,
        backend=chosen,
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        how="torchrun" if LAUNCHER_PID not in environ else "local",
        job=f"job {environ.get('TORCHELASTIC_RUN_ID') or environ.get(LAUNCHER_PID, '')}".strip(),
        may_restart=int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0,
    )


def _from_slurm(environ: Mapping[str, str], backend: BackendChoice) -> RankInfo:
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
    if missing := [name for name in needed if name not in environ]:
        raise LayoutError(f"SLURM started this task but did not set {', '.join(missing)}")
    node, local_rank = int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"])
    world_size = int(environ["SLURM_STEP_NUM_TASKS"])
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_world_size = counts[node] if node < len(counts) else world_size
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    requeued = environ.get("SLURM_RESTART_COUNT") or "0"
    port = master_port(int(job), (int(step) if step.isdecimal() else 0) + int(requeued))
    device, chosen = _device(environ, backend, local_rank, local_world_size)
    return RankInfo(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        device=device,
        backend=chosen,
        master_addr=environ.get("MASTER_ADDR") or first_host(nodelist),
        master_port=int(environ.get("MASTER_PORT") or port),
        how="slurm",
        job=f"SLURM job {job}.{step} (requeued {requeued} times)",
    )


def _tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, from SLURM's `2(x3),1`."""
    counts: list[int] = []
    for piece in filter(None, text.split(",")):
        count, _, repeat = piece.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts


def _device(
    environ: Mapping[str, str], backend: BackendChoice, local_rank: int, local_world_size: int
) -> tuple[str, Backend]:
    """The device of a local rank, an index into the visible GPUs; gloo computes on the CPU."""
    gpus = this_machine(environ).gpus if backend != "gloo" else 0
    if gpus == 0:
        if backend == "nccl":
            raise LayoutError(
                "launch.backend=nccl needs GPUs, and this process sees none; "
                "use launch.backend=auto or launch.backend=gloo to run on the CPU"
            )
        return "cpu", "gloo"
    if gpus == 1 and "SLURM_STEP_ID" in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return "cuda:0", "nccl"  # SLURM was asked to show each task one GPU of its own.
    if local_rank >= gpus:
        raise LayoutError(
            f"{local_world_size} ranks were started on a machine where they see "
            f"{gpus} GPU{'s' * (gpus > 1)} (CUDA_VISIBLE_DEVICES="
            f"{environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start as many as there are GPUs, "
            "or use launch.backend=gloo to run on the CPU"
        )
    return f"cuda:{local_rank}", "nccl"
