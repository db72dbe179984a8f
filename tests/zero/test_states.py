"""Optimizer state in memory and in a file: the same values come back, and nothing else moves."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megads.errors import ConfigError
from megads.parallel.pieces import Stored, TensorPiece
from megads.zero import states
from megads.zero.memory import BUFFER_SETS, PAGE
from megads.zero.states import MASTER, FileStates, MemoryStates, States

KINDS = (MASTER, "exp_avg", "exp_avg_sq")
PER_PAGE = PAGE // 4
NUMELS = (64, 3 * PER_PAGE, 5 * PER_PAGE + 192, 128)
"""Less than a page, whole pages, a part of one at the end."""
SMALLEST = BUFFER_SETS * len(KINDS) * PAGE
"""The budget that holds a page of each kind."""


def in_file(directory: Path, budget: int = SMALLEST) -> FileStates:
    return FileStates(directory, KINDS, NUMELS, budget=budget)


def in_memory(_: Path) -> MemoryStates:
    return MemoryStates([{kind: torch.zeros(n) for kind in KINDS} for n in NUMELS])


def value(shard: int, kind: str) -> Tensor:
    """What the tests write: another number for every element of every kind."""
    return torch.arange(float(NUMELS[shard])) + 100000 * shard + 30000 * KINDS.index(kind)


def whole(held: States, shard: int, kind: str) -> Tensor:
    out = torch.full((NUMELS[shard],), float("nan"))
    reading = held.read(shard, kind, out)
    if reading is not None:
        reading.result()
    return out


def fill(held: States) -> None:
    for shard in range(len(NUMELS)):
        for kind in KINDS:
            held.write(shard, kind, value(shard, kind))


@pytest.fixture(params=["memory", "file", "file of one piece per shard"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[States]:
    make = {
        "memory": in_memory,
        "file": in_file,
        "file of one piece per shard": lambda d: in_file(d, 2**20),
    }[request.param]
    with closing(make(tmp_path)) as made:
        yield made


def test_zeros_at_first(held: States) -> None:
    for shard in range(len(NUMELS)):
        for kind in KINDS:
            assert not whole(held, shard, kind).any()


def test_what_is_written_is_read(held: States) -> None:
    fill(held)
    for shard in range(len(NUMELS)):
        for kind in KINDS:
            assert torch.equal(whole(held, shard, kind), value(shard, kind))


def test_other_types_are_converted(held: States) -> None:
    held.write(0, MASTER, value(0, MASTER).bfloat16())
    out = torch.empty(NUMELS[0], dtype=torch.float16)
    reading = held.read(0, MASTER, out)
    if reading is not None:
        reading.result()
    assert torch.equal(out, value(0, MASTER).bfloat16().half())


def test_a_stream_visits_every_element_once_in_order_and_keeps_changes(held: States) -> None:
    fill(held)
    for round_ in range(1, 4):
        seen: list[tuple[int, int, int]] = []
        for piece in held.stream():
            seen.append((piece.shard, piece.start, piece.stop))
            assert tuple(piece.tensors) in (KINDS, KINDS[1:] + KINDS[:1])
            for kind, tensor in piece.tensors.items():
                want = value(piece.shard, kind)[piece.start : piece.stop] + round_ - 1
                assert torch.equal(tensor, want), (round_, piece.shard, piece.start, kind)
                tensor += 1
        covered = [(shard, i) for shard, start, stop in seen for i in range(start, stop)]
        assert covered == [(shard, i) for shard, n in enumerate(NUMELS) for i in range(n)]
    for shard in range(len(NUMELS)):
        for kind in KINDS:
            assert torch.equal(whole(held, shard, kind), value(shard, kind) + 3)


def test_pieces_fit_the_budget(tmp_path: Path) -> None:
    with closing(in_file(tmp_path)) as held:
        sizes = [piece.stop - piece.start for piece in held.stream()]
        assert max(sizes) == PER_PAGE and len(sizes) == 1 + 3 + 6 + 1


@settings(max_examples=40, deadline=None)
@given(
    shard=st.integers(0, len(NUMELS) - 1),
    kind=st.sampled_from(KINDS),
    bounds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_a_part_can_be_opened_wherever_it_begins(
    tmp_path_factory: pytest.TempPathFactory, shard: int, kind: str, bounds: tuple[int, int]
) -> None:
    start, stop = sorted(bound % NUMELS[shard] for bound in bounds)
    stop += 1
    for make in (in_memory, in_file):
        with closing(make(tmp_path_factory.getbasetemp() / "parts")) as held:
            fill(held)
            check_part(held, shard, kind, start, stop)


def check_part(held: States, shard: int, kind: str, start: int, stop: int) -> None:
    """Reading and writing elements [start, stop) of one kind, and the rest stays what it is."""
    piece = TensorPiece(
        "x", torch.float32, (10**6,), (0,), (stop - start,), held.held(shard, kind, start, stop)
    )
    assert piece.data.numel() == stop - start and piece.data.dtype == torch.float32
    expected = value(shard, kind)
    with piece.opened() as data:
        assert torch.equal(data, expected[start:stop])
        if isinstance(piece.data, Stored):
            data.fill_(-7)  # not kept
    with piece.opened(write=True) as data:
        assert torch.equal(data, expected[start:stop])
        data.fill_(-3)
    expected[start:stop] = -3
    for other in range(len(NUMELS)):
        for name in KINDS:
            want = expected if (other, name) == (shard, kind) else value(other, name)
            assert torch.equal(whole(held, other, name), want)


def test_an_error_while_a_part_is_open_keeps_nothing(tmp_path: Path) -> None:
    with closing(in_file(tmp_path)) as held:
        fill(held)
        with pytest.raises(KeyError), held.held(1, MASTER, 3, 9).opened(write=True) as data:
            data.fill_(-1)
            raise KeyError
        assert torch.equal(whole(held, 1, MASTER), value(1, MASTER))


def test_no_name_leads_to_the_file(tmp_path: Path) -> None:
    """So that a run that is killed leaves nothing behind."""
    directory = tmp_path / "not" / "there yet"
    held = in_file(directory)
    fill(held)
    assert list(directory.iterdir()) == []
    files = open_files()
    held.close()
    assert len(files - open_files()) == 1


def open_files() -> set[str]:
    return {f.name for f in Path("/proc/self/fd").iterdir()}


def test_two_ranks_can_share_a_directory(tmp_path: Path) -> None:
    with closing(in_file(tmp_path)) as a, closing(in_file(tmp_path)) as b:
        fill(a)
        assert not whole(b, 1, MASTER).any()


@pytest.mark.parametrize("budget", [1, SMALLEST, SMALLEST + PAGE, 3 * SMALLEST - 1, 2**20, 2**40])
def test_buffers_stay_within_the_budget(tmp_path: Path, budget: int) -> None:
    """Unless that is less than a page of each kind; and no more than the largest shard is taken."""
    with closing(in_file(tmp_path, budget)) as held:
        in_state, buffers, file = held.usage()
        assert in_state == 0 and file == held.layout.file_bytes
        assert buffers == held.layout.buffer_bytes <= max(budget, SMALLEST)
        assert buffers >= min(budget - SMALLEST, 6 * SMALLEST)
        fill(held)
        pieces = sum(-(-numel // held.layout.piece) for numel in NUMELS)
        assert sum(1 for _ in held.stream()) == pieces


def test_the_space_is_taken_at_once(tmp_path: Path) -> None:
    with closing(in_file(tmp_path)) as held:
        status = os.fstat(held._file)
        assert status.st_size == held.usage()[2] == len(KINDS) * (1 + 3 + 6 + 1) * PAGE
        assert status.st_blocks * 512 >= status.st_size


def refused(directory: Path, numel: int = 10**6) -> str:
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        FileStates(directory, KINDS, [numel], budget=2**20)
    assert open_files() == before, "a file was left open"
    return str(caught.value)


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(states.os, "posix_fallocate", is_full)
    message = refused(tmp_path)
    assert f"parallel.offload_path={tmp_path}" in message
    free = os.statvfs(tmp_path)
    gigabytes = float(re.search(r"needs 0\.01 GB, (\S+) GB is free \(No space", message)[1])
    assert gigabytes == pytest.approx(free.f_bavail * free.f_frsize / 1e9, rel=0.1, abs=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_refused(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        message = refused(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"parallel.offload_path={tmp_path}" in message and "needs 0.01 GB" in message


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    assert refused(below) == f"parallel.offload_path={below}: Not a directory"
    if os.path.isdir("/proc/self"):
        assert "parallel.offload_path=/proc/self: " in refused(Path("/proc/self"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refused(tmp_path) == f"parallel.offload_path={tmp_path}: Permission denied"


def test_an_error_in_a_transfer_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails while nobody waits ends the step."""
    for name in ("preadv", "pwritev"):
        with monkeypatch.context() as patch, closing(in_file(tmp_path)) as held:

            def fails(*_: object) -> int:
                raise OSError(errno.EIO, "broken disk")

            patch.setattr(states.os, name, fails)
            with pytest.raises(OSError, match="broken disk"):
                list(held.stream())


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(states.os, "preadv", lambda f, b, o: preadv(f, [b[0][:PAGE]], o))
    monkeypatch.setattr(states.os, "pwritev", lambda f, b, o: pwritev(f, [b[0][:PAGE]], o))
    with closing(in_file(tmp_path, 2**20)) as held:
        fill(held)
        for shard in range(len(NUMELS)):
            assert torch.equal(whole(held, shard, "exp_avg"), value(shard, "exp_avg"))
