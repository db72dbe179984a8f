"""Joining and leaving the job's default process group."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megads.errors import HangError, WorkerFailure

MOST_POLL_S = 0.5


class Place(Protocol):
    """What a launcher tells a process: its rank, its device and where to meet the others.

    `job` names the job to its own processes and to nobody else's, as far as the launcher can tell.
    `may_restart`: the launcher may start all processes again with the same store.
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
    @property
    def may_restart(self) -> bool: ...


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
    """A part of a store for this start of a job alone, once all of its ranks have come.

    Raises WorkerFailure when the port of the store is taken, when the store is another job's, for
    a rank that has another backend than the first, and for the second process that comes as the
    same rank; the job that owns the store goes on. Raises HangError when a rank does not come.
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
        store.set("megads/backend", place.backend)
    found = store.get("megads/job").decode()
    if found != mine:
        raise WorkerFailure(
            f"{place.init_method} belongs to {found}, this is rank {place.rank} of {mine}; set "
            f"MASTER_PORT differently for each"
        )
    if (backend := store.get("megads/backend").decode()) != place.backend:
        raise WorkerFailure(
            f"rank {place.rank} on {socket.gethostname()} would compute with {place.backend}, rank "
            f"0 with {backend}: one of them sees GPUs and the other none; mend that, or choose "
            f"launch.backend=gloo, which uses no GPU"
        )
    return dist.PrefixStore(f"megads/start-{_start(store, place, mine, timeout_s)}", store)


def _start(store: dist.Store, place: Place, job: str, timeout_s: float) -> int:
    """The number of this start of the job in the store, once every rank has come to it.

    A launcher that starts all processes again does not tell all of them how often it has done so,
    thus the first rank counts. Another rank that has been counted in a start is of a later one.
    """
    twice = WorkerFailure(
        f"{job}: two processes came as rank {place.rank}; start megads-train once for each rank "
        f"(srun, without torchrun) or one torchrun with its own --node-rank on each node"
    )
    deadline = time.monotonic() + timeout_s
    if place.rank == 0:
        number = store.add("megads/starts", 1)
        if number > 1 and not place.may_restart:
            raise twice
        came = {rank: f"megads/{number}/rank-{rank}" for rank in range(1, place.world_size)}
        try:
            store.wait(list(came.values()), timedelta(seconds=timeout_s))
        except (dist.DistStoreError, RuntimeError) as error:  # the latter from a file
            missing = [rank for rank, key in came.items() if not store.check([key])]
            raise HangError(f"{job}: ranks {missing} did not come in {timeout_s:.0f} s") from error
        store.set(f"megads/{number}/all", "")
        return number
    counted, is_first, pause_s = 0, False, 0.01
    while time.monotonic() < deadline:
        number = int(store.get("megads/starts"))
        if number != counted:
            counted, is_first = number, store.add(f"megads/{number}/rank-{place.rank}", 1) == 1
        if is_first and store.check([f"megads/{number}/all"]):
            return number
        if not is_first and not place.may_restart:
            raise twice
        time.sleep(pause_s)  # polled, since a wait that is in vain prints a warning of its own
        pause_s = min(MOST_POLL_S, 1.5 * pause_s)
    raise HangError(f"{job}: not all ranks came in {timeout_s:.0f} s") if is_first else twice


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
