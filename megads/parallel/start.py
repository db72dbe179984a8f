"""Joining and leaving the job's default process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megads.errors import WorkerFailure


class Place(Protocol):
    """What a launcher tells a process: its rank, its device and where to meet the others.

    `job` names the job to its own processes and to nobody else's, as far as the launcher can tell.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def init_method(self) -> str: ...
    @property
    def job(self) -> str: ...


def start_process_group(place: Place, *, timeout_s: float) -> None:
    """Join the default group; every rank of the job must. One process alone needs none.

    A collective that waits longer than `timeout_s` raises on gloo and ends the process on nccl.
    Raises what `meet` raises.
    """
    on_gpu = place.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(place.device)
    if place.world_size == 1:
        return
    dist.init_process_group(
        place.backend,
        store=meet(place, timeout_s=timeout_s),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(place.device) if on_gpu else None,
    )


def meet(place: Place, *, timeout_s: float) -> dist.Store:
    """The store in which the ranks of a job find one another, when it is sure to be this job's.

    Raises WorkerFailure when the port of the store is taken, when the store is another job's, and
    for the second process that comes as the same rank; the job that owns the store goes on.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(
            rendezvous(place.init_method, place.rank, place.world_size, timeout=timeout)
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise WorkerFailure(
            f"{place.init_method}: another program uses this port; set MASTER_PORT to a free one"
        ) from error
    mine = f"{place.job} of {place.world_size} processes"
    if place.rank == 0:
        store.set("megads/job", mine)
    found = store.get("megads/job").decode()
    if found != mine:
        raise WorkerFailure(
            f"{place.init_method} belongs to {found}, this is rank {place.rank} of {mine}; set "
            f"MASTER_PORT differently for each"
        )
    if store.add(f"megads/rank-{place.rank}", 1) > 1:
        raise WorkerFailure(
            f"{mine}: two processes came as rank {place.rank}; start megads-train once for each "
            f"rank (srun, without torchrun) or one torchrun with its own --node-rank on each node"
        )
    return store


def all_raise(error: Exception | None) -> None:
    """Raise what the first rank gives, if it gives something, on every rank. Collective."""
    said = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise said[0]


def stop_process_group() -> None:
    """Leave in order: wait for all ranks, then destroy every group. Nothing when there is none.

    Only for runs that end well; after a failure the others may never come.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
