"""How the global batch size grows at the beginning of a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError


@dataclass(frozen=True)
class BatchRampup:
    """Global batch size as a function of the samples consumed so far.

    Begins with `start` and grows by `increment` after each equal share of `samples` until it is
    `final`. A step never changes size in the middle: it has the size due when it begins.

    Raises ConfigError when `final` is not `start` plus a multiple of `increment`.
    """

    start: int
    increment: int
    samples: int
    final: int

    def __post_init__(self) -> None:
        if self.start > self.final or (self.final - self.start) % self.increment:
            raise ConfigError(
                f"train.batch_rampup: from {self.start} in increments of {self.increment} does not "
                f"arrive at train.global_batch_size={self.final}"
            )

    @classmethod
    def make(cls, rampup: tuple[int, int, int] | None, final: int) -> BatchRampup:
        """From `train.batch_rampup` and `train.global_batch_size`; None is a constant size."""
        start, increment, samples = rampup or (final, 1, 1)
        return cls(start, increment, samples, final)

    def sizes(self) -> tuple[int, ...]:
        """Every size the batch can have, ascending."""
        return tuple(range(self.start, self.final + 1, self.increment))

    def size_at(self, consumed: int) -> int:
        """Global batch size of the step that begins after `consumed` samples."""
        increments = (self.final - self.start) // self.increment
        return self.start + self.increment * min(increments, consumed * increments // self.samples)

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """Samples consumed after `steps` more steps: the running sum of the real sizes."""
        while steps > 0:
            size = self.size_at(consumed)
            if size == self.final:
                return consumed + steps * size
            consumed, steps = consumed + size, steps - 1
        return consumed
