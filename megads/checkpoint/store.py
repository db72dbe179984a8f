"""Saving and loading by all ranks together.

Every method but `steps`, `read_manifest` and `failed` is collective: all ranks of the world axis
call it, and all return or all raise. Whatever one rank cannot do (a full disk, a missing file) is
exchanged as a value, never left for the others to find out in a collective that hangs.

A save has two halves. `begin` agrees on who writes what and copies what this rank writes; then a
thread writes, exchanges outcomes and commits, on a process group of its own, since two threads
that use one group could meet in each other's collectives. `save` is the same, waited for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.checkpoint import directory
from megads.checkpoint.exchange import together
from megads.checkpoint.manifest import Manifest
from megads.checkpoint.planner import SavePlanner
from megads.checkpoint.reader import check_model, fill_pieces
from megads.checkpoint.snapshot import HostCopies
from megads.checkpoint.writer import SaveMeta, SavePlan, WrittenFile, make_manifest, write_files
from megads.config.model import ModelConfig
from megads.errors import CheckpointError
from megads.parallel.mesh import Axis
from megads.parallel.pieces import Stored, TensorPiece

NICENESS = 15
"""Of the thread that writes a checkpoint while training goes on."""


@dataclass(frozen=True)
class LoadedState:
    """Where a load came from and the training state found there."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.manifest.state)


class CheckpointStore:
    """The checkpoints of a run, in `path` (`run.dir/checkpoints`), as the ranks of `world` see it.

    `saving`: the same ranks with a process group that nothing but the background half of a save
    uses; None where saves are waited for before anything else happens. `keep`: how many of the
    newest stay after a save; -1 all, 0 counts as 1. A rank starts another file after
    `max_file_bytes`.
    """

    def __init__(
        self,
        path: str | Path,
        world: Axis,
        *,
        saving: Axis | None = None,
        keep: int = -1,
        max_file_bytes: int = 4 << 30,
    ) -> None:
        self.path = Path(path)
        self.world = world
        self.saving = saving or world
        self.keep = keep
        self.max_file_bytes = max_file_bytes
        self._copies = HostCopies()
        self._planner = SavePlanner(world)
        self._in_flight: Future[Path] | None = None

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending, as this rank sees them."""
        return directory.committed_steps(self.path)

    def latest(self) -> int | None:
        """The newest committed step, decided by the first rank for all; None without any."""

        def look() -> int | None:
            if self.world.index:
                return None
            directory.recover(self.path)
            steps = self.steps()
            return steps[-1] if steps else None

        return together(self.world, f"looking for checkpoints in {self.path}", look)[0]

    def candidates(self, path: Path | None = None) -> list[Path]:
        """The checkpoints that `path` means, newest first, as the first rank sees them.

        None means this store's own, of which there may be none. Raises CheckpointError on all
        ranks saying what was looked for.
        """

        def look() -> list[Path]:
            if self.world.index:
                return []
            if path is not None:
                return directory.find_checkpoints(path)
            directory.recover(self.path)
            return [directory.step_path(self.path, step) for step in reversed(self.steps())]

        return together(self.world, f"looking for checkpoints in {path or self.path}", look)[0]

    def set_aside(self, checkpoints: Sequence[Path]) -> None:
        """Make checkpoints of this store count no more; a later save of their step deletes them."""

        def work() -> None:
            for checkpoint in checkpoints if self.world.index == 0 else ():
                directory.set_aside(checkpoint)

        together(self.world, "setting checkpoints aside", work)

    def read_manifest(self, checkpoint: int | str | Path) -> Manifest:
        """The checked manifest of a step or path."""
        return directory.read_manifest(self._find(checkpoint))

    def save(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        *,
        state: Mapping[str, Any],
        meta: SaveMeta,
    ) -> Path:
        """`begin` and `wait`: returns when everything is on the disk and committed."""
        self.begin(step, pieces, state=state, meta=meta)
        path = self.wait()
        assert path is not None
        return path

    def begin(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        *,
        state: Mapping[str, Any],
        meta: SaveMeta,
    ) -> None:
        """Start writing what the ranks hold now as the checkpoint of `step`.

        The pieces of all ranks must fill every tensor exactly; the same piece may come from
        several ranks, and is then written by one of them. Empty pieces are ignored. `state` is
        plain JSON values, equal on all ranks. On return the pieces may change: those in memory
        have been copied, and stored ones, which may not fit there, written. A save that is still
        in flight is waited for first. Raises CheckpointError on all ranks if that one failed or
        the pieces do not fit together.
        """
        self.wait()
        doing = f"saving step {step}"
        plan, mine = self._planner.plan(step, pieces, state, self.path, doing)
        share = {index: mine[index] for index in plan.writes[self.world.index]}
        stored = {i: piece for i, piece in share.items() if isinstance(piece.data, Stored)}
        held = {i: piece for i, piece in share.items() if i not in stored}
        early: Future[list[WrittenFile]] = Future()
        try:
            copies = dict(zip(held, self._copies.take(list(held.values())), strict=True))
            early.set_result(self._write(plan, stored, 0))
        except Exception as error:  # for all ranks to hear of when outcomes are exchanged
            early.set_exception(error)

        def write() -> list[WrittenFile]:
            files = early.result()
            return files + self._write(plan, copies, len(files))

        # On Linux niceness is a thread's own: training computes first where cores are few.
        values, executor = dict(state), ThreadPoolExecutor(1, "saving", os.nice, (NICENESS,))
        self._in_flight = executor.submit(self._finish, plan, write, values, meta, doing)
        executor.shutdown(wait=False)

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows yet."""
        save = self._in_flight
        return save is not None and save.done() and save.exception() is not None

    def until_ended(self) -> None:
        """Return once no save is under way; what became of it is for `failed` and `wait`."""
        if self._in_flight is not None:
            futures.wait([self._in_flight])

    def wait(self) -> Path | None:
        """Return once no save is in flight: the checkpoint that became of it, None without one.

        Raises CheckpointError on all ranks if anything failed on any; nothing is then left of the
        attempt, and all earlier checkpoints are as they were.
        """
        save, self._in_flight = self._in_flight, None
        return None if save is None else save.result()

    def load(
        self,
        checkpoint: int | str | Path,
        wanted: Sequence[TensorPiece],
        *,
        model: ModelConfig | None = None,
        check: Callable[[Manifest], None] | None = None,
    ) -> LoadedState:
        """Fill the `data` of every wanted piece from a step or path (see `find_checkpoint`).

        Any layout's pieces load from any other's: only the blocks needed are read, and all that is
        read is checked. Floating-point types are converted to that of `data`, rounding to nearest;
        other types must be equal. With `model`, the saved model must be the same up to
        `manifest.FREE_FIELDS`; `check` may raise too. Raises CheckpointError on all ranks if
        anything fails on any, DamageError if another checkpoint may do; `data` may then be half
        filled.
        """
        loaded: list[LoadedState] = []

        def work() -> int:
            path = self._find(checkpoint)
            manifest = directory.read_manifest(path)
            if model is not None:
                check_model(path, manifest, model)
            if check is not None:
                check(manifest)
            fill_pieces(path, manifest, [piece for piece in wanted if piece.numel])
            loaded.append(LoadedState(path, manifest))
            return manifest.step

        steps = together(self.world, f"loading {checkpoint}", work)
        if len(set(steps)) > 1:
            raise CheckpointError(f"loading {checkpoint}: the ranks found different steps: {steps}")
        return loaded[0]

    def _find(self, checkpoint: int | str | Path) -> Path:
        if isinstance(checkpoint, int):
            return directory.step_path(self.path, checkpoint)
        return directory.find_checkpoint(Path(checkpoint))

    def _write(
        self, plan: SavePlan, share: Mapping[int, TensorPiece], first: int
    ) -> list[WrittenFile]:
        if not share:
            return []
        rank, limit = self.world.index, self.max_file_bytes
        return write_files(plan, rank, share, max_file_bytes=limit, first=first)

    def _finish(
        self,
        plan: SavePlan,
        write: Callable[[], list[WrittenFile]],
        state: Mapping[str, Any],
        meta: SaveMeta,
        doing: str,
    ) -> Path:
        """The half of a save that training does not wait for."""
        final = directory.step_path(self.path, plan.step)
        is_first = self.saving.index == 0

        def commit() -> None:
            if is_first:
                directory.commit(plan.temporary, final, make_manifest(plan, files, state, meta))

        try:
            files = together(self.saving, doing, write)
            together(self.saving, doing, commit)
        except CheckpointError:
            if is_first:
                shutil.rmtree(plan.temporary, ignore_errors=True)
            raise
        if is_first:
            directory.retain(self.path, self.keep, plan.step)
        return final
