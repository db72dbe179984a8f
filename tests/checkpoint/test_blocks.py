"""Digests of blocks: equal however the bytes arrive, and different for every kind of damage."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import numpy
import pytest

from megads.checkpoint import blocks
from megads.checkpoint.blocks import BlockReader, FileDigest, check_whole, write_blocks
from megads.checkpoint.manifest import BLOCK, FileEntry
from megads.errors import CheckpointError, DamageError

SIZES = [1, 7, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 12345]


def content(size: int, seed: int = 0) -> bytes:
    return numpy.random.default_rng(seed).bytes(size)


def written(path: Path, data: bytes) -> FileEntry:
    return write_blocks(path, [memoryview(data)])


def slow_digest(data: bytes) -> str:
    """The definition, with Python's integers."""
    data += bytes(-len(data) % 4096)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    columns = [sum(words[i::512]) % 2**64 for i in range(512)]
    rows = [sum(words[i : i + 512]) % 2**64 for i in range(0, len(words), 512)]
    packed = [b"".join(n.to_bytes(8, "little") for n in sums) for sums in (columns, rows)]
    return f"{zlib.crc32(packed[1], zlib.crc32(packed[0])):08x}"


@pytest.mark.parametrize("size", SIZES)
def test_the_digest_is_the_one_defined_and_does_not_depend_on_the_parts(tmp_path, size):
    data, draw = content(size), random.Random(size)
    entry = written(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data and entry.size == size
    expected = [slow_digest(data[i : i + BLOCK]) for i in range(0, size, BLOCK)]
    assert entry.digest == "sums:" + "".join(expected)
    parts, at = FileDigest(), 0
    while at < size:
        length = draw.choice([1, 13, 5000, 700_000, 2 * BLOCK])
        parts.update(memoryview(data)[at : at + length])
        at += length
    assert parts.text() == entry.digest


@pytest.mark.parametrize("seed", range(40))
def test_damage_of_any_kind_changes_the_digest(seed):
    draw = random.Random(seed)
    size = draw.choice([24, 4096 * 3, BLOCK])
    data = bytearray(content(size, seed))
    before = slow_digest(bytes(data)) if size < BLOCK else one(data)
    at, sector = draw.randrange(size), min(512, size // 2)
    match seed % 5:
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:  # a sector that was never written
            start = at // sector * sector
            data[start : start + sector] = bytes(len(data[start : start + sector]))
        case 2:  # two sectors in each other's place
            data[:sector], data[-sector:] = data[-sector:], data[:sector]
        case 3:  # an old page
            data[-sector:] = content(sector, seed + 1000)
        case 4:  # shifted by a byte
            data[:] = data[1:] + data[:1]
    assert one(data) != before


def one(data: bytes | bytearray) -> str:
    digest = FileDigest()
    digest.update(memoryview(data))
    return digest.text().removeprefix("sums:")


@pytest.mark.parametrize("window", [BLOCK, 4 * BLOCK])
def test_any_range_reads_as_it_was_written(tmp_path, window):
    data, draw = content(5 * BLOCK + 999), random.Random(3)
    entry = written(tmp_path / "a", data)
    with BlockReader(tmp_path / "a", entry, window=window) as reader:
        for _ in range(60):
            start = draw.randrange(len(data))
            stop = draw.randrange(start, min(start + 3 * BLOCK, len(data))) + 1
            ahead = draw.choice([0, stop, len(data)])
            assert reader.read(start, stop, ahead=ahead).tobytes() == data[start:stop]


def test_only_the_blocks_asked_for_are_read_and_checked(tmp_path):
    data = bytearray(content(4 * BLOCK))
    entry = written(tmp_path / "a", bytes(data))
    data[2 * BLOCK + 5] ^= 1
    (tmp_path / "a").write_bytes(data)
    with BlockReader(tmp_path / "a", entry) as reader:
        reader.read(0, 2 * BLOCK)
        reader.read(3 * BLOCK, 4 * BLOCK)
        with pytest.raises(DamageError, match=rf"a is damaged: bytes {2 * BLOCK} to {3 * BLOCK}"):
            reader.read(2 * BLOCK, 2 * BLOCK + 1)
        with pytest.raises(DamageError):  # and what was read of it is not handed out either
            reader.read(2 * BLOCK, 2 * BLOCK + 1)
    with pytest.raises(DamageError):
        check_whole(tmp_path / "a", entry)


def test_lost_and_cut_files_are_named(tmp_path):
    entry = written(tmp_path / "a", content(5000))
    os.truncate(tmp_path / "a", 4999)
    with pytest.raises(DamageError, match="a is damaged: 4999 bytes instead of 5000"):
        BlockReader(tmp_path / "a", entry)
    with pytest.raises(DamageError, match=r"cannot read .*b: No such file"):
        BlockReader(tmp_path / "b", entry)


def test_files_of_the_first_format_are_checked_as_a_whole(tmp_path):
    data = content(2 * BLOCK + 5)
    (tmp_path / "a").write_bytes(data)
    check_whole(tmp_path / "a", FileEntry(size=len(data), digest=f"crc32:{zlib.crc32(data):08x}"))
    with pytest.raises(DamageError, match="digest crc32"):
        check_whole(tmp_path / "a", FileEntry(size=len(data), digest="crc32:00000000"))


def test_short_writes_are_completed():
    """The system may take less than it is given."""
    taken = bytearray()

    def write(data):
        taken.extend(data[:3])
        return min(3, len(data))

    blocks._write_all(write, memoryview(b"0123456789"))
    assert bytes(taken) == b"0123456789"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_what_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch, number):
    entry = written(tmp_path / "a", content(5000))

    def refused(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        with BlockReader(tmp_path / "a", entry) as reader, pytest.raises(CheckpointError) as read:
            reader.read(0, 1)
        patch.setattr(os, "open", refused)
        with pytest.raises(CheckpointError, match="not known to be damaged") as opened:
            BlockReader(tmp_path / "a", entry)
    for caught in (read.value, opened.value):
        assert not isinstance(caught, DamageError) and caught.may_pass
        assert f"move {tmp_path} away" in str(caught)
