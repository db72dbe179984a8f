"""Randomness as a pure function of where it is used, so that no generator state is ever saved.

Every draw has a seed of its own, a hash of what it is for: the run's seed and the parameter for
initial weights; the run's seed, step, microbatch, layer and site for dropout. Recomputing a block,
resuming a run or moving a layer to another pipeline stage therefore gives the same draws.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part, the same on all platforms and versions."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on `device` that starts from `seed`."""
    return torch.Generator(device=device).manual_seed(seed)


@dataclass(frozen=True)
class DropoutKey:
    """Randomness of one forward pass; a block that is recomputed is given the same key again."""

    replicated: int
    sharded: int

    def site(self, layer: int, name: str, *, sharded: bool) -> int:
        """Seed of one dropout.

        `sharded`: the activation is this tensor-parallel rank's own (attention heads, or hidden
        states under sequence parallelism), so that ranks must draw differently; otherwise they
        hold copies of one activation and must draw the same.
        """
        return derive_seed(self.sharded if sharded else self.replicated, layer, name)


class DropoutRng:
    """Holds the dropout key of the forward pass that comes next."""

    def __init__(self, tp_index: int = 0) -> None:
        self._tp_index = tp_index
        self._key: DropoutKey | None = None

    def seed(self, *position: int) -> None:
        """Set the key from the position in the run: run seed, step, microbatch index.

        Layers enter where a key is used, by their global index: with the same position the draws
        do not depend on the split into stages.
        """
        self._key = DropoutKey(
            replicated=derive_seed("replicated", *position),
            sharded=derive_seed("sharded", self._tp_index, *position),
        )

    @property
    def key(self) -> DropoutKey:
        """The current key. Raises RuntimeError when `seed` was never called."""
        if self._key is None:
            raise RuntimeError("dropout is on but DropoutRng.seed was not called before forward")
        return self._key
