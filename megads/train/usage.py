"""The memory that a run uses."""

from __future__ import annotations

import torch

from megads.parallel import collectives
from megads.train.build import RunParts


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
