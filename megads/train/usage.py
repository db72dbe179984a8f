"""What a run makes of its devices."""

from __future__ import annotations

import torch

from megads.models.flops import device_peak_tflops, recomputed_flops, training_flops
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


def _device_name(device: torch.device) -> str:
    """The marketing name of a GPU; "cpu" otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
