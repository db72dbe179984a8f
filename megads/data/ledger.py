"""What a run has read, step by step, in a file that `megads.data.audit` can hold it to.

`data-ledger.jsonl` has one JSON object a line. A line with `"kind": "start"` is written when a run
starts or goes on: the step and the samples before it, and the whole data plan. A line with
`"kind": "step"` follows each step: its number, the samples consumed before it, how many it read, a
digest of them, and what each source of the plan has given by then. Steps after the one that a
later start goes on from were rolled back, and count no more. Pure: no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megads.data.order import DataOrder, Located
from megads.data.plan import DataPlan, PlannedSource

LEDGER = "data-ledger.jsonl"
VERSION = 1


def source_code(source: PlannedSource) -> int:
    """A source's 64-bit name in digests: of its identity and seed."""
    text = f"{source.identity} {source.seed}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def samples_digest(plan: DataPlan, located: Located) -> str:
    """BLAKE2b, 128 bits in hex, of (source code, sample id) pairs in the order they are read.

    Each is 8 little-endian bytes.
    """
    codes = np.asarray([source_code(source) for source in plan.sources], dtype="<u8")
    pairs = np.empty((located.sample.size, 2), dtype="<u8")
    pairs[:, 0] = codes[located.source]
    pairs[:, 1] = located.sample
    return hashlib.blake2b(pairs.tobytes(), digest_size=16).hexdigest()


class DataLedger:
    """Writes on one rank; silent on the others, which may call everything all the same."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._file: TextIO | None = None
        self._order: DataOrder | None = None
        if writes:
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")

    def start(self, order: DataOrder, *, step: int, samples: int, seq_length: int) -> None:
        """The run goes on after `step` steps and `samples` samples, in this order."""
        self._order = order
        self._write(
            {
                "kind": "start",
                "version": VERSION,
                "step": step,
                "samples": samples,
                "seq_length": seq_length,
                "plan": order.plan.to_dict(),
            }
        )

    def record(self, step: int, samples: int, count: int) -> None:
        """Step number `step` has read the `count` samples after `samples`."""
        if self._file is None or self._order is None:
            return
        order = self._order
        positions = order.positions(np.arange(samples, samples + count, dtype=np.int64))
        self._write(
            {
                "kind": "step",
                "step": step,
                "samples": samples,
                "count": count,
                "digest": samples_digest(order.plan, order.locate(positions)),
                "given": order.counts(int(positions[-1]) + 1).tolist(),
            }
        )

    def sync(self) -> None:
        """Make what was written durable: a checkpoint must not know of steps that this does not."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
            self._file.flush()


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed run did not finish writing."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - 65536)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
