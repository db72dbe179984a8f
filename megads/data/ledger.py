"""What a run has read, step by step, in a file that `megads.data.audit` can hold it to.

`data-ledger.jsonl` has one JSON object a line. A line with `"kind": "start"` is written when a run
starts or goes on: the step and the samples before it, and the whole data plan. A line with
`"kind": "step"` follows each step: its number, the samples consumed before it, how many it read, a
digest of them, and what each source of the plan has given by then. Steps after the one that a
later start goes on from were rolled back, and count no more. A line with `"kind": "rewind"` says
which samples a bad step had the run leave out, for good: whoever goes on with the run reads these
lines first. A run that streams its data writes them alone. Pure: no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megads.data.order import DataOrder, Located
from megads.data.plan import DataPlan, PlannedSource
from megads.errors import DataError

LEDGER = "data-ledger.jsonl"
VERSION = 1
REWIND_LINE = b'"kind":"rewind"'
"""In lines of that kind and no others."""


@dataclass(frozen=True)
class Rewind:
    """A run went back from a bad step, to leave out positions `[first, after)` of its stream.

    `run` is the id of the run, as another may have begun in the same directory. `verdict`, `loss`
    and `grad_norm` are those of the bad step, `to_step` is where the run went on from.
    """

    run: str
    step: int
    to_step: int
    first: int
    after: int
    verdict: str
    loss: float
    grad_norm: float

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Rewind:
        """From a line of the ledger. Raises DataError for one that is not of that kind."""
        try:
            return cls(**{field.name: entry[field.name] for field in fields(cls)})
        except KeyError as error:
            raise DataError(f"a rewind without its {error}") from None

    def __str__(self) -> str:
        return (
            f"from step {self.step} ({self.verdict}: loss {self.loss:.4g}, gradient norm "
            f"{self.grad_norm:.4g}) to step {self.to_step}, without positions {self.first} to "
            f"{self.after - 1}"
        )


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

    def start(
        self, order: DataOrder, *, run: str, step: int, samples: int, seq_length: int
    ) -> None:
        """The run `run` goes on after `step` steps and `samples` samples, in this order."""
        self._order = order
        self._write(
            {
                "kind": "start",
                "version": VERSION,
                "run": run,
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

    def rewind(self, rewind: Rewind) -> None:
        """Have the run leave out samples, durably: whoever goes on from here reads them no more."""
        self._write({"kind": "rewind", **asdict(rewind)})
        self.sync()

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


def read_rewinds(path: Path, run: str) -> list[Rewind]:
    """The rewinds of the run with this id, in the order they were made; none without a ledger.

    Raises DataError for a line that is damaged.
    """
    found = []
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if REWIND_LINE in line:
                    found.append(_rewind_of(path, number, line))
    return [rewind for rewind in found if rewind.run == run]


def _rewind_of(path: Path, number: int, line: bytes) -> Rewind:
    try:
        return Rewind.from_entry(json.loads(line))
    except (ValueError, DataError) as error:
        raise DataError(f"{path}, line {number}: {error}") from None


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
