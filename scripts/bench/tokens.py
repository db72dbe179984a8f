"""A file of random tokens in Megatron's .bin/.idx format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

UINT16 = 8
"""Code of the token type in the index."""


def write_random_tokens(prefix: Path, *, vocab: int, count: int, seed: int = 0) -> None:
    """Write about `count` tokens of a skewed vocabulary as documents of 256 to 2048 tokens.

    The index holds, little-endian: a magic of 9 bytes, version (u64), type code (u8), number of
    sequences and of document marks (u64 each), lengths (i32), byte offsets (i64) and the sequence
    at which each document begins, closed by the number of sequences (i64).
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(256, 2049, size=max(1, count // 1152)).astype("<i4")
    total = int(lengths.sum())
    tokens = np.minimum(rng.random(total) ** 3 * vocab, vocab - 1).astype("<u2")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * tokens.itemsize
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    header = np.array([1], "<u8").tobytes() + bytes([UINT16])
    header += np.array([len(lengths), len(documents)], "<u8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + header
        + lengths.tobytes()
        + offsets.astype("<i8").tobytes()
        + documents.tobytes()
    )
