"""Joining and leaving the job's default process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


class Place(Protocol):
    """What a launcher tells a process: its rank, its device and where to meet the others."""

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


def start_process_group(place: Place, *, timeout_s: float) -> None:
    """Join the default group; every rank of the job must. One process alone needs none.

    A collective that waits longer than `timeout_s` raises on gloo and ends the process on nccl.
    """
    on_gpu = place.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(place.device)
    if place.world_size == 1:
        return
    dist.init_process_group(
        place.backend,
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(place.device) if on_gpu else None,
    )


def stop_process_group() -> None:
    """Leave in order: wait for all ranks, then destroy every group. Nothing when there is none.

    Only for runs that end well; after a failure the others may never come.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
