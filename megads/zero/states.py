"""Where a rank keeps the fp32 state of its shards: master weights and the optimizer's moments.

Both forms hand out the same: a stream of pieces, each a set of flat tensors to be updated in place.
In memory, of the device or of the host, a piece is a whole shard and its tensors are the state
itself. In a file, a piece is a part of a shard that fits the budget: while it is updated, the next
one is read and the one before is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megads.errors import ConfigError
from megads.parallel.pieces import Stored
from megads.zero.memory import BUFFER_SETS, PAGE, FileLayout, in_pages

MASTER = "param"
"""Kind of the master weights; other kinds are the update rule's state names."""


@dataclass(frozen=True)
class StatePiece:
    """Elements [start, stop) of shard number `shard`, in a tensor of each kind."""

    shard: int
    start: int
    stop: int
    tensors: Mapping[str, Tensor]


class States(Protocol):
    """The state of a rank's shards, by shard number and kind."""

    def stream(self) -> Iterator[StatePiece]:
        """All state in shard order; a piece may be changed until the next one is asked for."""

    def read(self, shard: int, kind: str, out: Tensor) -> Future[None] | None:
        """Copy one kind of a whole shard into `out`, of any type; a Future if that takes time."""

    def write(self, shard: int, kind: str, values: Tensor) -> None:
        """Copy `values`, of any type, into one kind of a whole shard."""

    def held(self, shard: int, kind: str, start: int, stop: int) -> Tensor | Stored:
        """Elements [start, stop) of one kind, to be read or written where they are."""

    def usage(self) -> tuple[int, int, int]:
        """Bytes of state in memory, of buffers in memory, and of state in a file."""

    def close(self) -> None:
        """Give up what is outside of memory."""


class MemoryStates:
    """State in memory: of the device, or of the host (pinned if the model is on a GPU)."""

    def __init__(self, shards: Sequence[dict[str, Tensor]]) -> None:
        self.shards = list(shards)

    def stream(self) -> Iterator[StatePiece]:
        for number, tensors in enumerate(self.shards):
            yield StatePiece(number, 0, tensors[MASTER].numel(), tensors)

    def read(self, shard: int, kind: str, out: Tensor) -> Future[None] | None:
        out.copy_(self.shards[shard][kind])
        return None

    def write(self, shard: int, kind: str, values: Tensor) -> None:
        self.shards[shard][kind].copy_(values)

    def held(self, shard: int, kind: str, start: int, stop: int) -> Tensor | Stored:
        return self.shards[shard][kind][start:stop]

    def usage(self) -> tuple[int, int, int]:
        return sum(t.nbytes for tensors in self.shards for t in tensors.values()), 0, 0

    def close(self) -> None:
        pass


class FileStates:
    """State in a file of this rank's own, in `directory`, that no name leads to.

    The file is unlinked as soon as it is open: nobody can read it later, and the space is free
    again however the process ends. Zeros at first. Where the file system allows, reading and
    writing goes past the page cache. `pinned`: copies to and from a GPU are made of the memory in
    between. Raises ConfigError if the directory cannot hold the file.
    """

    def __init__(
        self,
        directory: Path,
        kinds: Sequence[str],
        numels: Sequence[int],
        *,
        budget: int,
        pinned: bool = False,
    ) -> None:
        self._kinds = tuple(kinds)
        self.layout = FileLayout(len(self._kinds), tuple(numels), budget)
        self._offsets, self._piece = self.layout.offsets(), self.layout.piece
        self._file = _reserve(directory, self.layout.file_bytes)
        self._pinned = pinned
        self._sets = [
            {kind: self.host_buffer(4 * self._piece) for kind in self._kinds}
            for _ in range(BUFFER_SETS)
        ]
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def stream(self) -> Iterator[StatePiece]:
        plan = [
            (shard, start, min(start + self._piece, numel))
            for shard, numel in enumerate(self.layout.numels)
            for start in range(0, numel, self._piece)
        ]
        free = deque(self._sets)
        writing: deque[tuple[Future[None], dict[str, Tensor]]] = deque()
        ahead = None
        for number, where in enumerate(plan):
            if ahead is None:
                ahead = self._begin(where, free.popleft())
            reading, buffers = ahead
            if number + 1 < len(plan):
                if not free:
                    done, oldest = writing.popleft()
                    done.result()
                    free.append(oldest)
                ahead = self._begin(plan[number + 1], free.popleft())
            reading.result()
            shard, start, stop = where
            yield StatePiece(shard, start, stop, {k: b[: stop - start] for k, b in buffers.items()})
            done = self._writer.submit(self._transfer, where, buffers, write=True)
            writing.append((done, buffers))
        for done, _ in writing:
            done.result()

    def _begin(
        self, where: tuple[int, int, int], buffers: dict[str, Tensor]
    ) -> tuple[Future[None], dict[str, Tensor]]:
        return self._reader.submit(self._transfer, where, buffers, write=False), buffers

    def _transfer(
        self, where: tuple[int, int, int], buffers: dict[str, Tensor], *, write: bool
    ) -> None:
        shard, start, stop = where
        for kind, buffer in buffers.items():
            span = in_pages(4 * (stop - start))
            self.move(buffer, span, self._at(shard, kind) + 4 * start, write=write)

    def _at(self, shard: int, kind: str) -> int:
        region = in_pages(4 * self.layout.numels[shard])
        return self._offsets[shard] + self._kinds.index(kind) * region

    def move(self, buffer: Tensor, nbytes: int, offset: int, *, write: bool) -> None:
        """Read or write all of `nbytes`; the system may do less at a time."""
        view = memoryview(buffer.view(torch.uint8).numpy())[:nbytes]  # type: ignore[arg-type]
        done = 0
        while done < nbytes:
            if write:
                count = os.pwritev(self._file, [view[done:]], offset + done)
            else:
                count = os.preadv(self._file, [view[done:]], offset + done)
            if not count:
                raise OSError(f"optimizer state file ends at {offset + done}")
            done += count

    def read(self, shard: int, kind: str, out: Tensor) -> Future[None] | None:
        buffer = self._sets[0][kind]  # nobody streams while parameters are read

        def work() -> None:
            for part, piece in self._parts(shard, kind):
                self.move(buffer, in_pages(4 * piece.numel()), piece.offset, write=False)
                out[part].copy_(buffer[: piece.numel()])

        return self._reader.submit(work)

    def write(self, shard: int, kind: str, values: Tensor) -> None:
        for part, piece in self._parts(shard, kind):
            with piece.opened(write=True) as old:
                old.copy_(values[part])

    def _parts(self, shard: int, kind: str) -> Iterator[tuple[slice, FileSlice]]:
        """A whole shard in parts that fit the budget."""
        numel = self.layout.numels[shard]
        for start in range(0, numel, self._piece):
            stop = min(start + self._piece, numel)
            yield slice(start, stop), self.held(shard, kind, start, stop)

    def held(self, shard: int, kind: str, start: int, stop: int) -> FileSlice:
        return FileSlice(self, self._at(shard, kind) + 4 * start, stop - start)

    def usage(self) -> tuple[int, int, int]:
        buffers = sum(buffer.nbytes for buffers in self._sets for buffer in buffers.values())
        return 0, buffers, os.fstat(self._file).st_size

    def host_buffer(self, nbytes: int) -> Tensor:
        """fp32 memory at a page boundary."""
        if self._pinned:
            return torch.zeros(nbytes // 4, pin_memory=True)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.float32)

    def close(self) -> None:
        self._reader.shutdown()
        self._writer.shutdown()
        os.close(self._file)


class FileSlice(Stored):
    """Elements of a FileStates, in memory only while they are opened."""

    dtype = torch.float32

    def __init__(self, owner: FileStates, offset: int, numel: int) -> None:
        self._owner, self.offset, self._numel = owner, offset, numel

    def numel(self) -> int:
        return self._numel

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[Tensor]:
        skipped = self.offset % PAGE
        first, nbytes = self.offset - skipped, in_pages(skipped + 4 * self._numel)
        buffer = self._owner.host_buffer(nbytes)
        self._owner.move(buffer, nbytes, first, write=False)
        yield buffer[skipped // 4 : skipped // 4 + self._numel]
        if write:
            self._owner.move(buffer, nbytes, first, write=True)


def _reserve(directory: Path, nbytes: int) -> int:
    """An open file of that size, full of zeros, with its space on the disk taken."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".megads-offload-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"parallel.offload_path={directory}: {error.strerror}") from error
    try:
        if nbytes:
            os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        system = os.fstatvfs(handle)
        free = system.f_bavail * system.f_frsize
        os.close(handle)
        raise ConfigError(
            f"parallel.offload_path={directory}: this rank's optimizer state needs "
            f"{nbytes / 1e9:.2f} GB, {free / 1e9:.2f} GB is free ({error.strerror})"
        ) from error
    with contextlib.suppress(OSError, AttributeError):  # not every file system can
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
    return handle
