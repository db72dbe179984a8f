"""Output that is not finished yet, in a form that a later run can continue after a sudden end.

The folder `<prefix>.partial` holds the tokens and the lengths written so far, and a `state.json`
that says how much of both, and of the input, is known to be on the disk. Whatever is behind that
mark is cut off when a run continues. The state is good for one job only: a digest of the inputs,
the tokenizer and the options; another job begins anew. A lock keeps two runs apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megads.data.encoding import Finished
from megads.data.token_format import CHUNK, Header, PendingPair, sync_and_close, write_index
from megads.errors import DataError


class BusyError(DataError):
    """Another process is writing the same output."""


@dataclass
class Totals:
    """What is done; bytes as in `Chunk`."""

    chunks: int = 0
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    longest: int = 0
    unknown: int = 0
    size: int = 0
    packed: int = 0

    def add(self, finished: Finished, item_bytes: int) -> None:
        """Count a chunk whose tokens take `item_bytes` bytes each."""
        encoded = finished.encoded
        self.chunks += 1
        self.documents += encoded.documents
        self.empty += encoded.empty
        self.tokens += len(encoded.tokens) // item_bytes
        self.longest = max(self.longest, encoded.longest)
        self.unknown += encoded.unknown
        self.size += finished.size
        self.packed += finished.packed


class UnfinishedTokens:
    """The folder of one job, locked; `totals` say where to go on.

    `commit_every`: seconds between marks, that is, the work that a sudden end can cost. Raises
    BusyError when another process is writing the same output.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any], job: str, commit_every: float) -> None:
        self.prefix, self.dtype, self.job = prefix, dtype, job
        self.folder = Path(prefix + ".partial")
        self._every, self._committed = commit_every, time.monotonic()
        self._lock = _locked(self.folder)
        self.totals = self._read_state()
        self._tokens = self._continued("tokens.bin", self.totals.tokens * dtype.itemsize)
        self._lengths = self._continued("lengths.bin", self.totals.documents * 4)

    def add(self, finished: Finished) -> None:
        """Append a chunk's documents."""
        self._tokens.write(finished.encoded.tokens)
        self._lengths.write(finished.encoded.lengths)
        self.totals.add(finished, self.dtype.itemsize)
        if time.monotonic() - self._committed >= self._every:
            self.commit()

    def commit(self) -> None:
        """Put all that was added on the disk, then the mark that says so."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        written = self.folder / "state.json.tmp"
        with written.open("wb") as file:
            file.write(json.dumps({"job": self.job, **asdict(self.totals)}).encode())
            sync_and_close(file)
        os.replace(written, self.folder / "state.json")
        self._committed = time.monotonic()

    def publish(self) -> None:
        """Make the pair of files out of it, and remove the folder."""
        self.commit()
        pair = PendingPair(self.prefix)
        count = self.totals.documents
        try:
            header = Header(self.dtype, count, count + 1)
            write_index(pair.idx, header, self._pieces_of_lengths, _counting(count + 1))
            pair.bin = self.folder / "tokens.bin"  # never under a name that may be dropped
            pair.publish()
        finally:
            pair.idx.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        """Remove the folder and all that is in it."""
        for file in (self._tokens, self._lengths):
            file.close()
        for name in ("state.json", "state.json.tmp", "tokens.bin", "lengths.bin", "lock"):
            (self.folder / name).unlink(missing_ok=True)
        # NFS keeps an open file that is removed in the folder, until it is closed.
        self._lock.close()
        with suppress(OSError):  # another run has come between
            self.folder.rmdir()

    def keep(self) -> None:
        """Close the files and leave them for a later run."""
        try:
            self.commit()
        finally:
            for file in (self._tokens, self._lengths, self._lock):
                file.close()

    def _read_state(self) -> Totals:
        """Zeros unless a state of this job is there, whole, with the bytes that it speaks of."""
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
            totals = Totals(**{field.name: int(state[field.name]) for field in fields(Totals)})
            wanted = (totals.tokens * self.dtype.itemsize, totals.documents * 4)
            there = [(self.folder / n).stat().st_size for n in ("tokens.bin", "lengths.bin")]
            fine = state["job"] == self.job and wanted[0] <= there[0] and wanted[1] <= there[1]
            return totals if fine else Totals()
        except (OSError, ValueError, KeyError, TypeError):
            return Totals()

    def _continued(self, name: str, size: int) -> BinaryIO:
        path = self.folder / name
        path.touch()
        file = path.open("r+b")
        file.truncate(size)
        file.seek(size)
        return file

    def _pieces_of_lengths(self) -> Iterator[NDArray[Any]]:
        with (self.folder / "lengths.bin").open("rb") as file:
            while data := file.read(4 * CHUNK):
                yield np.frombuffer(data, "<i4")


def _counting(stop: int) -> Iterator[NDArray[Any]]:
    for start in range(0, stop, CHUNK):
        yield np.arange(start, min(start + CHUNK, stop))


def _locked(folder: Path) -> BinaryIO:
    """The open lock file of the folder, made if need be; the lock ends with the process.

    A file system without locks keeps nobody out.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / "lock").open("ab")
        except FileNotFoundError:  # a run that just finished removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise BusyError(
                f"{folder}: another process is writing this output; wait for it, or choose another"
            ) from error
        except OSError:
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / "lock").stat()):
                return lock
        lock.close()
