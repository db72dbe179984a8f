"""Where the files of a checkpoint of Megatron-LM are, and for which ranks there are some."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from megads.convert.source import ReadOptions
from megads.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
_ITERATION = re.compile(r"iter_(\d+)")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")


def is_torch(folder: Path) -> bool:
    """Whether an iteration's folder has the files of the `torch` format."""
    return any(folder.glob(f"mp_rank_*/{RANK_FILE}"))


def is_torch_dist(folder: Path) -> bool:
    """Whether an iteration's folder has the files of the `torch_dist` format."""
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


def holds(path: Path) -> bool:
    """Whether there is a checkpoint of Megatron-LM: a folder of them, or one iteration's."""
    if is_torch(path) or is_torch_dist(path):
        return True
    tracked = (path / TRACKER).is_file() and not (path / "latest").is_file()  # that is DeepSpeed's
    return path.is_dir() and (tracked or any(_iterations(path)))


def iteration_folder(path: Path, options: ReadOptions) -> Path:
    """The folder of the iteration to read.

    Raises CheckpointError if it isn't there, or can't be told.
    """
    if is_torch(path) or is_torch_dist(path):
        named = _ITERATION.fullmatch(path.name)
        if options.step is not None and named and int(named[1]) != options.step:
            raise CheckpointError(f"{path} is not of --step {options.step}; name the folder above")
        return path
    if options.step is not None:
        folder = _iterations(path).get(options.step)
    else:
        folder = _latest(path)
    if folder is None:
        there = ", ".join(str(step) for step in sorted(_iterations(path)))
        raise CheckpointError(
            f"{path} has no iteration {options.step}; there are {there or 'none'}"
        )
    if not (is_torch(folder) or is_torch_dist(folder)):
        raise CheckpointError(
            f"{folder} holds neither mp_rank_*/{RANK_FILE} nor .metadata and metadata.json"
        )
    return folder


def check_backend(folder: Path) -> None:
    """Raise CheckpointError if the distributed checkpoint in `folder` is of another kind."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if backend != "torch_dist":
        raise CheckpointError(f"{path}: format {backend!r} is not read; torch and torch_dist are")


def _iterations(path: Path) -> dict[int, Path]:
    """Iterations by number; what cannot be one is left out."""
    names = {entry: _ITERATION.fullmatch(entry.name) for entry in path.glob("iter_*")}
    return {int(match[1]): entry for entry, match in names.items() if match and entry.is_dir()}


def _latest(path: Path) -> Path:
    tracker = path / TRACKER
    if not tracker.is_file():
        there = ", ".join(str(step) for step in sorted(_iterations(path)))
        raise CheckpointError(
            f"{path} has no {TRACKER} that names the iteration to take; choose one of {there} "
            "with --step"
        )
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return path / "release"
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} should name an iteration, and says {text!r}")
    folder = _iterations(path).get(int(text))
    if folder is None:
        raise CheckpointError(f"{tracker} names iteration {text}, and there is no iter_{text:0>7}")
    return folder


@dataclass(frozen=True)
class Ranks:
    """Files of a grid of tensor- and pipeline-parallel ranks: `files[stage][tp]`."""

    files: tuple[tuple[Path, ...], ...]

    @property
    def tp(self) -> int:
        return len(self.files[0])

    @property
    def pp(self) -> int:
        return len(self.files)


def rank_files(folder: Path) -> Ranks:
    """The files of all ranks; raises CheckpointError naming one that is missing."""
    found: dict[tuple[int, int], Path] = {}
    for entry in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(entry.name)
        if match is None or match[3]:
            raise CheckpointError(f"{entry}: expert parallelism is not supported")
        found[int(match[2] or 0), int(match[1])] = entry / RANK_FILE
    pp, tp = (max(rank[axis] for rank in found) + 1 for axis in (0, 1))
    for stage in range(pp):
        for rank in range(tp):
            file = found.get((stage, rank))
            if file is None or not file.is_file():
                raise CheckpointError(
                    f"{folder} has files up to tensor rank {tp - 1} and stage {pp - 1}, and none "
                    f"of tensor rank {rank} in stage {stage}"
                )
    return Ranks(tuple(tuple(found[stage, rank] for rank in range(tp)) for stage in range(pp)))


def rank_folder(rank: int, stage: int, pp: int) -> str:
    """What Megatron-LM calls a rank's folder."""
    return f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
