"""What a run makes of its devices: speed and memory."""

from __future__ import annotations

import torch

from megads.models.flops import device_peak_tflops, recomputed_flops, training_flops
from megads.parallel import collectives
from megads.parallel.layout import BatchPlan
from megads.train.build import RunParts


def speed_report(parts: RunParts, batch: BatchPlan, seconds: float) -> dict[str, float | None]:
    """Speed of a step that took `seconds`, over all of the job or per device where it says so.

    A token counts once, however many ranks have seen it. `mfu` is the share of the devices' peak
    that the model's own operations make up, `hfu` that of all that were done, with what
    recomputation did again; None if the peak is not known.
    """
    config = parts.config
    model, sequences, length = config.model, batch.global_batch_size, batch.seq_length
    needed = training_flops(model, sequences, length)
    again = recomputed_flops(
        model,
        sequences,
        length,
        recompute=config.train.recompute,
        layers=config.train.recompute_layers,
        chunks=parts.plan.split,
    )
    per_device = seconds * parts.mesh.world.size * 1e12
    peak = config.logging.peak_tflops or device_peak_tflops(
        _device_name(parts.mesh.device), config.precision.name
    )
    return {
        "tokens_per_second": sequences * length / seconds,
        "tflops_per_device": needed / per_device,
        "mfu": needed / per_device / peak if peak else None,
        "hfu": (needed + again) / per_device / peak if peak else None,
    }


def memory_report(parts: RunParts) -> dict[str, int]:
    """Memory of the rank that uses most of it, by kind, in bytes: the most so far. Collective.

    `peak_memory_bytes` is everything: the resident set on the CPU, the allocator's peak on a GPU.
    The kinds are those that `megads.train.memory` predicts: model states on the device, then on
    the host and in a file if offloaded; tables; activations where they are measured.
    """
    states, device = parts.optimizer.memory(), parts.mesh.device
    on_gpu, logging = device.type == "cuda", parts.config.logging
    values = {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else _resident(),
        "parameter_bytes": states.device.parameters,
        "gradient_bytes": states.device.gradients,
        "optimizer_bytes": states.device.optimizer,
        "buffer_bytes": states.device.buffers + sum(m.table_bytes for m in parts.modules),
        "host_bytes": states.host.total,
        "file_bytes": states.file,
    }
    if logging.activations:
        values["activation_bytes"] = parts.saved.device.peak
        values["activation_host_bytes"] = parts.saved.host.peak
    most = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    collectives.all_reduce(most, parts.mesh.world, "max")
    return {key: int(value) for key, value in zip(values, most.tolist(), strict=True)}


def _resident() -> int:
    """Largest resident set of this process."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_name(device: torch.device) -> str:
    """The marketing name of a GPU; "cpu" otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
