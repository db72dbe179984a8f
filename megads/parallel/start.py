"""Joining and leaving the job's default process group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def start_process_group(
    *,
    rank: int,
    world_size: int,
    backend: str,
    init_method: str,
    device: str,
    timeout_s: float,
) -> None:
    """Join the default group; every rank of the job must. One process alone needs none.

    A collective that waits longer than `timeout_s` raises on gloo and ends the process on nccl.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        return
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(device) if on_gpu else None,
    )


def stop_process_group() -> None:
    """Leave in order: wait for all ranks, then destroy every group. Nothing when there is none.

    Only for runs that end well; after a failure the others may never come.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
