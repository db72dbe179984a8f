from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from megads.checkpoint import directory
from megads.checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry
from megads.errors import CheckpointError
from tests.checkpoint.simulation import MODEL

FILE = "a.safetensors"


def manifest(step: int) -> Manifest:
    piece = PieceEntry(file=FILE, tensor="w@0", offset=(0,), shape=(2,))
    return Manifest(
        step=step,
        model=MODEL,
        layout={},
        state={},
        tensors={"w": TensorEntry(dtype="float32", shape=(2,), pieces=(piece,))},
        files={FILE: FileEntry(size=40, digest="crc32:00000000")},
    )


def written(root: Path, step: int, fill: bytes = b"x") -> Path:
    """A temporary directory with everything but its manifest."""
    temporary = root / f".tmp-step-{step}-0123abcd"
    temporary.mkdir(parents=True)
    (temporary / FILE).write_bytes(fill * 40)
    return temporary


def make(root: Path, step: int, fill: bytes = b"x") -> Path:
    directory.commit(written(root, step, fill), root / f"step-{step}", manifest(step))
    return root / f"step-{step}"


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def add_junk(root: Path) -> set[str]:
    junk = {"step-x", "step-", "step-007", "step_12", "tmp", "latest", "step-99999", "step--1"}
    for name in junk - {"latest", "step_12"}:
        (root / name).mkdir()
    (root / "latest").write_text("step-99999")
    (root / "step_12").mkdir()
    (root / "step_12" / "COMMIT").touch()
    (root / "step-007" / "COMMIT").touch()
    return junk


def test_newest_is_by_number_and_junk_is_no_checkpoint(tmp_path):
    for step in (9000, 9, 10000, 10):
        make(tmp_path, step)
    add_junk(tmp_path)
    assert directory.committed_steps(tmp_path) == [9, 10, 9000, 10000]
    assert sorted(f"step-{s}" for s in (9, 9000, 10000))[-1] == "step-9000", "text order is wrong"
    assert directory.find_checkpoint(tmp_path).name == "step-10000"


@pytest.mark.parametrize(
    ("keep", "left"), [(-1, {1, 2, 9, 10}), (0, {10}), (1, {10}), (2, {9, 10}), (99, {1, 2, 9, 10})]
)
def test_retention_keeps_the_newest_and_leaves_junk_alone(tmp_path, keep, left):
    for step in (2, 9, 1, 10):
        make(tmp_path, step)
    junk = add_junk(tmp_path)
    written(tmp_path, 5)
    directory.retain(tmp_path, keep, 10)
    assert names(tmp_path) == {f"step-{step}" for step in left} | junk


@pytest.mark.parametrize("keep", range(1, 9))
def test_retention_while_a_run_saves_step_by_step(tmp_path, keep):
    for step in range(1, 13):
        make(tmp_path, step)
        directory.retain(tmp_path, keep, step)
        assert directory.committed_steps(tmp_path) == list(range(max(1, step - keep + 1), step + 1))


def test_retention_never_deletes_what_was_just_saved(tmp_path):
    for step in (8, 9, 3):
        make(tmp_path, step)
    directory.retain(tmp_path, 1, 3)
    assert directory.committed_steps(tmp_path) == [3]


def test_a_deletion_that_fails_is_not_fatal(tmp_path, monkeypatch, caplog):
    make(tmp_path, 1)
    make(tmp_path, 2)

    def refuse(path):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(directory.shutil, "rmtree", refuse)
    directory.retain(tmp_path, 1, 2)
    assert "Permission denied" in caplog.text
    assert directory.committed_steps(tmp_path) == [2], "half deleted is deleted"


def test_commit_says_which_manifest_it_is_for(tmp_path):
    path = make(tmp_path, 4)
    raw = (path / "manifest.json").read_bytes()
    assert (path / "COMMIT").read_text() == f"sha256:{hashlib.sha256(raw).hexdigest()}\n"
    assert names(path) == {"COMMIT", "manifest.json", FILE}
    assert directory.read_manifest(path) == manifest(4)


def test_a_manifest_that_is_not_the_committed_one_is_refused(tmp_path):
    path = make(tmp_path, 4)
    raw = json.loads((path / "manifest.json").read_text())
    raw["step"] = 5
    (path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        directory.read_manifest(path)


@pytest.mark.parametrize("content", ["", "sha256:00\n"])
def test_a_damaged_commit_is_refused(tmp_path, content):
    path = make(tmp_path, 4)
    (path / "COMMIT").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        directory.read_manifest(path)


def test_without_commit_it_does_not_exist(tmp_path):
    make(tmp_path, 1)
    path = make(tmp_path, 2)
    (path / "COMMIT").unlink()
    assert directory.committed_steps(tmp_path) == [1]
    for look in (directory.find_checkpoint, directory.read_manifest):
        with pytest.raises(CheckpointError, match="COMMIT"):
            look(path)


def test_find_accepts_a_run_its_checkpoints_or_one_checkpoint(tmp_path):
    make(tmp_path / "checkpoints", 3)
    path = make(tmp_path / "checkpoints", 12)
    for start in (tmp_path, tmp_path / "checkpoints", path):
        assert directory.find_checkpoint(start) == path
    with pytest.raises(CheckpointError, match="does not exist"):
        directory.find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        directory.find_checkpoint(tmp_path / "empty")


def test_a_file_another_node_wrote_must_be_visible(tmp_path):
    temporary = written(tmp_path, 1)
    (temporary / FILE).write_bytes(b"x" * 39)
    with pytest.raises(CheckpointError, match="share"):
        directory.commit(temporary, tmp_path / "step-1", manifest(1))
    assert not (tmp_path / "step-1").exists()


def fail_at(monkeypatch, point: int) -> list[str]:
    """Make the n-th file-system operation of a commit fail; returns those that were asked for."""
    asked: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
        monkeypatch.setattr(owner, name, _failing(getattr(owner, name), name, asked, point))
    return asked


def _failing(real, name: str, asked: list[str], point: int):
    def operation(*args):
        asked.append(name)
        if len(asked) == point:
            raise OSError(28, "No space left on device")
        return real(*args)

    return operation


@pytest.mark.parametrize("existing", [False, True])
def test_a_commit_that_fails_anywhere_changes_nothing(tmp_path, existing):
    if existing:
        make(tmp_path, 1, b"o")
    for point in range(1, 30):
        temporary = written(tmp_path, 1, b"n")
        with pytest.MonkeyPatch.context() as patch:
            asked = fail_at(patch, point)
            try:
                directory.commit(temporary, tmp_path / "step-1", manifest(1))
            except CheckpointError as error:
                assert "No space left" in str(error)
            else:
                break
        assert directory.committed_steps(tmp_path) == ([1] if existing else []), asked
        if existing:
            assert (tmp_path / "step-1" / FILE).read_bytes() == b"o" * 40
        directory.shutil.rmtree(temporary)
        assert names(tmp_path) == ({"step-1"} if existing else set()), asked
    assert point > 6, "fewer points of failure than there are operations"
    assert (tmp_path / "step-1" / FILE).read_bytes() == b"n" * 40
    assert names(tmp_path) == {"step-1"}


@pytest.mark.parametrize("put_in_place", [False, True])
def test_a_crash_while_replacing_brings_the_old_one_back(tmp_path, put_in_place):
    path = make(tmp_path, 1, b"o")
    path.rename(tmp_path / ".old-step-1-0123abcd")
    if put_in_place:
        written(tmp_path, 1, b"n").rename(path)
    assert directory.committed_steps(tmp_path) == []
    directory.recover(tmp_path)
    assert directory.committed_steps(tmp_path) == [1]
    assert (path / FILE).read_bytes() == b"o" * 40


def test_a_crash_after_replacing_removes_the_old_one(tmp_path):
    make(tmp_path, 1, b"o").rename(tmp_path / ".old-step-1-0123abcd")
    make(tmp_path, 1, b"n")
    directory.recover(tmp_path)
    assert names(tmp_path) == {"step-1"}
    assert (tmp_path / "step-1" / FILE).read_bytes() == b"n" * 40


def test_of_a_checkpoint_behind_a_link_only_the_link_is_deleted(tmp_path):
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    for step in (1, 2, 3):
        make(root, step)
    (root / "step-1").rename(archive)
    (root / "step-1").symlink_to(archive)
    assert directory.committed_steps(root) == [1, 2, 3]
    directory.retain(root, 1, 3)
    assert names(root) == {"step-3"}
    assert directory.read_manifest(archive).step == 1 and (archive / FILE).is_file()


def test_a_directory_that_cannot_be_listed_now_is_no_failure(tmp_path, monkeypatch, caplog):
    make(tmp_path, 1)

    def stale(self):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", stale)
    directory.retain(tmp_path, 1, 1)
    assert "could not look for what to delete" in caplog.text and "Stale" in caplog.text
