"""The memory that a run uses, over all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megads.models.gpt import GPTStage
from megads.models.saved import SavedTensors
from megads.parallel import collectives
from megads.parallel.mesh import Mesh
from megads.zero.optimizer import ZeroOptimizer

EVERYTHING = "peak_memory_bytes"
GROWTH = 1.01
"""What everything together has to grow by before it is told of again."""


class MemoryUse:
    """Memory of the rank that uses most of it, by kind, in bytes: the most so far.

    `peak_memory_bytes` is everything: the resident set on the CPU, the allocator's peak on a GPU.
    The kinds are those that `megads.train.memory` predicts: model states on the device, then on
    the host and in a file if offloaded; tables; activations where `saved` counts them. After the
    first steps nothing grows any more, so ranks exchange their numbers only when one has news.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        modules: Sequence[GPTStage],
        saved: SavedTensors,
        mesh: Mesh,
    ) -> None:
        self._optimizer, self._modules, self._saved = optimizer, modules, saved
        self._mesh = mesh
        self._told: dict[str, int] = {}
        self.most: dict[str, int] = {}
        """What the ranks last agreed on."""

    def has_news(self) -> bool:
        """Whether this rank uses more than the others know of."""
        factor = {EVERYTHING: GROWTH}
        return any(
            value > factor.get(kind, 1) * self._told.get(kind, -1)
            for kind, value in self._mine().items()
        )

    def exchange(self) -> None:
        """Bring `most` up to date. Collective."""
        self._told = self._mine()
        values = torch.tensor(
            list(self._told.values()), dtype=torch.float64, device=self._mesh.device
        )
        most = collectives.reduced(values, self._mesh.world, "max")
        self.most = dict(zip(self._told, map(int, most), strict=True))

    def _mine(self) -> dict[str, int]:
        states, device = self._optimizer.memory(), self._mesh.device
        on_gpu = device.type == "cuda"
        values = {
            EVERYTHING: torch.cuda.max_memory_allocated(device) if on_gpu else _resident(),
            "parameter_bytes": states.device.parameters,
            "gradient_bytes": states.device.gradients,
            "optimizer_bytes": states.device.optimizer,
            "buffer_bytes": states.device.buffers + sum(m.table_bytes for m in self._modules),
            "host_bytes": states.host.total,
            "file_bytes": states.file,
        }
        if self._saved.counts:
            values["activation_bytes"] = self._saved.device.peak
            values["activation_host_bytes"] = self._saved.host.peak
        return values


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
