"""Token files built and taken apart with struct alone, apart from the package's own code."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Struct letters of the format's number type codes."""


@dataclass(frozen=True)
class Parsed:
    code: int
    sizes: list[int]
    pointers: list[int]
    bounds: list[int]


def parse(prefix: Path) -> Parsed:
    """An index in plain numbers."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, n, m = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    at = 34
    sizes = list(struct.unpack_from(f"<{n}i", raw, at))
    pointers = list(struct.unpack_from(f"<{n}q", raw, at + 4 * n))
    bounds = list(struct.unpack_from(f"<{m}q", raw, at + 12 * n))
    assert len(raw) == at + 12 * n + 8 * m
    return Parsed(code, sizes, pointers, bounds)


def sequences(prefix: Path) -> list[list[int]]:
    """The ids of every sequence."""
    index, raw = parse(prefix), Path(f"{prefix}.bin").read_bytes()
    letter = LETTERS[index.code]
    return [
        list(struct.unpack_from(f"<{size}{letter}", raw, pointer))
        for size, pointer in zip(index.sizes, index.pointers, strict=True)
    ]


def build(prefix: Path, documents: list[list[list[int]]], code: int = 8) -> None:
    """Write documents, each a list of sequences."""
    letter = LETTERS[code]
    tokens, sizes, pointers, bounds = b"", [], [], [0]
    for document in documents:
        for sequence in document:
            pointers.append(len(tokens))
            sizes.append(len(sequence))
            tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
        bounds.append(len(sizes))
    n, m = len(sizes), len(bounds)
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, n, m)
    index += struct.pack(f"<{n}i{n}q{m}q", *sizes, *pointers, *bounds)
    Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.idx").write_bytes(index)


def contents(prefix: Path) -> tuple[bytes, bytes]:
    """The bytes of both files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
