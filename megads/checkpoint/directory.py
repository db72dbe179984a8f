"""The directory of a run's checkpoints: which exist, how one comes to be, how one goes.

    step-N               a checkpoint, if it holds COMMIT
    .tmp-step-N-xxxxxxxx one being written, or left behind by a job that died; never read
    .old-step-N-xxxxxxxx one whose place is being taken by a new save of the same step
    .bad-step-N-xxxxxxxx one that was found damaged, or that the run went back behind; never read,
                         deleted when the run has come as far again

Anything else in there is left alone. Pure: files, no torch.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from megads.checkpoint.blocks import unreadable
from megads.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    Manifest,
    commit_text,
    decode_manifest,
    encode_manifest,
)
from megads.errors import CheckpointError, DamageError

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(r"\.tmp-step-[0-9]+-[0-9a-f]{8}")
_DAMAGED = re.compile(r"\.bad-step-([0-9]+)-[0-9a-f]{8}")
_REPLACED = re.compile(r"\.old-(step-[0-9]+)-[0-9a-f]{8}")


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return directory / f"step-{step}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint of a run, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def committed_steps(directory: Path) -> list[int]:
    """Steps of all checkpoints that exist, in ascending order."""
    if not directory.is_dir():
        return []
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in directory.iterdir())
    return sorted(int(m[1]) for m, entry in matches if m and (entry / COMMIT).is_file())


def uncommitted(directory: Path) -> list[str]:
    """Names of the step directories that hold no COMMIT: saves that never ended, by step."""
    if not directory.is_dir():
        return []
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in directory.iterdir())
    steps = [int(m[1]) for m, entry in matches if m and not (entry / COMMIT).is_file()]
    return [f"step-{step}" for step in sorted(steps)]


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that `path` means, newest first: itself, or all in it or its `checkpoints`.

    Raises CheckpointError saying what was looked for.
    """
    if (path / COMMIT).is_file():
        return [path]
    if _STEP.fullmatch(path.name) and (path / MANIFEST).exists():
        raise DamageError(f"{path} was never completed: it has no {COMMIT} file")
    for directory in (path, path / "checkpoints"):
        steps = committed_steps(directory)
        if steps:
            return [step_path(directory, step) for step in reversed(steps)]
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: it does not exist")
    raise CheckpointError(
        f"no checkpoint at {path}: neither it nor {path / 'checkpoints'} holds a step-N directory "
        f"with a {COMMIT} file"
    )


def find_checkpoint(path: Path) -> Path:
    """The newest of `find_checkpoints`."""
    return find_checkpoints(path)[0]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a committed checkpoint.

    Raises DamageError naming the file that is missing or not what was committed, CheckpointError
    when it was committed but is not valid, or cannot be read now.
    """
    path = checkpoint / MANIFEST
    try:
        committed = (checkpoint / COMMIT).read_bytes()
    except FileNotFoundError as error:
        raise DamageError(f"no checkpoint at {checkpoint}: it has no {COMMIT} file") from error
    except OSError as error:
        raise unreadable(checkpoint / COMMIT, error) from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if committed != commit_text(data).encode():
        raise DamageError(f"{path} is damaged: its SHA-256 is not the one in {COMMIT}")
    return decode_manifest(data, str(path))


def foreign_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Names of what is in a checkpoint's directory and not part of it."""
    own = {MANIFEST, COMMIT, *manifest.files}
    return sorted(entry.name for entry in checkpoint.iterdir() if entry.name not in own)


def commit(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Turn a directory of finished files into a checkpoint.

    Checks that every file is there with its size, writes the manifest, then COMMIT, and moves the
    directory into place. Raises CheckpointError; `final` is then as it was before.
    """
    for name, entry in manifest.files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CheckpointError(
                f"{path} is not visible on the rank that commits; run.dir must be on a file system "
                f"that all nodes share"
            )
    data = encode_manifest(manifest)
    write_small(temporary / MANIFEST, data)
    write_small(temporary / COMMIT, commit_text(data).encode())
    replaced = final.with_name(f".old-{final.name}-{temporary.name.rsplit('-', 1)[-1]}")
    undo: list[tuple[Path, Path]] = []
    try:
        for source, target in ((final, replaced), (temporary, final)):
            if source.exists():
                source.rename(target)
                undo.append((target, source))
        sync_directory(final.parent)
    except OSError as error:
        for moved, origin in reversed(undo):
            moved.rename(origin)
        raise CheckpointError(f"cannot commit {final}: {error}") from error
    if replaced.exists():
        _delete(replaced)


def write_small(path: Path, data: bytes) -> None:
    """Write a file so that it is either absent or complete, and on the disk on return."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(directory: Path) -> None:
    """Undo a replacement that a crash interrupted: the old checkpoint returns to its place.

    What dead saves left behind is deleted: a new one may need the space. One process at a time,
    and not while a save is running.
    """
    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        if _TEMPORARY.fullmatch(entry.name):
            _delete(entry)
            continue
        match = _REPLACED.fullmatch(entry.name)
        if not match or not (entry / COMMIT).is_file():
            continue
        final = directory / match[1]
        if (final / COMMIT).is_file():
            _delete(entry)
            continue
        if final.exists():
            shutil.rmtree(final)
        entry.rename(final)


def set_aside(path: Path) -> None:
    """Take a checkpoint out of the way, so that nothing counts it any more."""
    path.rename(path.with_name(f".bad-{path.name}-{secrets.token_hex(4)}"))
    sync_directory(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, or what is left of one; at no time does half of one look whole.

    Of one that a user has moved elsewhere, with a link in its place, only the link.
    """
    if path.is_symlink():
        path.unlink()
        return
    if _STEP.fullmatch(path.name):
        path = path.rename(path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}"))
    (path / COMMIT).unlink(missing_ok=True)
    shutil.rmtree(path)


def retain(directory: Path, keep: int, newest: int) -> None:
    """Delete all but the `keep` newest checkpoints, and what dead saves left behind.

    `keep` below 0 keeps all; 0 counts as 1. `newest`, just committed, always stays. A deletion
    that fails is logged: the checkpoint that was just written is worth more than tidiness.
    """
    try:
        doomed = [entry for entry in directory.iterdir() if _is_left_over(entry, newest)]
        if keep >= 0:
            older = [step for step in committed_steps(directory) if step != newest]
            surplus = older[: max(0, len(older) - (max(keep, 1) - 1))]
            doomed += [step_path(directory, step) for step in surplus]
    except OSError as error:
        log.warning("could not look for what to delete in %s: %s", directory, error)
        return
    for path in doomed:
        _delete(path)


def _is_left_over(entry: Path, newest: int) -> bool:
    """Whether nobody needs the directory once step `newest` is committed."""
    if damaged := _DAMAGED.fullmatch(entry.name):
        return int(damaged[1]) <= newest
    if _REPLACED.fullmatch(entry.name):
        return not (entry / COMMIT).exists()
    return _TEMPORARY.fullmatch(entry.name) is not None


def _delete(path: Path) -> None:
    try:
        remove_checkpoint(path)
    except OSError as error:
        log.warning("could not delete %s: %s", path, error)
