"""What is in wandb's own files of a run, read with its message types.

A file is a log of LevelDB's kind: after a header of 7 bytes, blocks of 32 KiB with records in one
piece or several, each piece after 7 bytes of checksum, length and kind.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        parts += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def files(run_dir: Path) -> list[Path]:
    """Those of a run's starts without its server, the first one first."""
    found = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    return sorted(found, key=lambda path: path.stat().st_mtime)


class Start:
    """What one start of a run has recorded."""

    def __init__(self, path: Path) -> None:
        found: dict[str, list[Any]] = {}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            found.setdefault(kind, []).append(getattr(record, kind))
        run = found["run"][0]
        self.id, self.project, self.name = run.run_id, run.project, run.display_name
        self.config = {u.key: json.loads(u.value_json) for u in run.config.update}
        self.axes = {m.name or m.glob_name: m.step_metric for m in found.get("metric", [])}
        self.history = [
            {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in line.item}
            for line in found.get("history", [])
        ]
        self.status = found["exit"][0].exit_code if "exit" in found else None

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.history if name in line]
