"""Saving and loading by all ranks together.

Every method but `steps` and `read_manifest` is collective: all ranks of the world axis call it,
and all return or all raise. Whatever one rank cannot do (a full disk, a missing file) is exchanged
as a value, never left for the others to find out in a collective that hangs.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megads.checkpoint import directory
from megads.checkpoint.manifest import Manifest
from megads.checkpoint.reader import check_model, fill_pieces
from megads.checkpoint.reshard import PieceInfo, assign_writers
from megads.checkpoint.writer import (
    SaveMeta,
    SavePlan,
    WrittenFile,
    make_manifest,
    piece_info,
    state_digests,
    write_share,
)
from megads.config.model import ModelConfig
from megads.errors import CheckpointError
from megads.parallel.collectives import all_gather_object
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece

T = TypeVar("T")


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

    `keep`: how many of the newest stay after a save; -1 all, 0 counts as 1. A rank starts another
    file after `max_file_bytes`.
    """

    def __init__(
        self, path: str | Path, world: Axis, *, keep: int = -1, max_file_bytes: int = 4 << 30
    ) -> None:
        self.path = Path(path)
        self.world = world
        self.keep = keep
        self.max_file_bytes = max_file_bytes

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

        return self._together(f"looking for checkpoints in {self.path}", look)[0]

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
        """Write what the ranks hold as the checkpoint of `step` and return its path.

        The pieces of all ranks must fill every tensor exactly; the same piece may come from
        several ranks, and is then written by one of them. Empty pieces are ignored. `state` is
        plain JSON values, equal on all ranks. Returns when everything is on the disk and
        committed. Raises CheckpointError on all ranks if anything fails on any; nothing is then
        left of the attempt, and all earlier checkpoints are as they were. A checkpoint of the same
        step is replaced.
        """
        doing = f"saving step {step}"
        plan, mine = self._plan(step, pieces, state, doing)

        def write() -> list[WrittenFile]:
            return write_share(plan, self.world.index, mine, max_file_bytes=self.max_file_bytes)

        try:
            files = self._together(doing, write)
            self._together(doing, lambda: self._commit(plan, files, state, meta))
        except CheckpointError:
            if self.world.index == 0:
                shutil.rmtree(plan.temporary, ignore_errors=True)
            raise
        return directory.step_path(self.path, step)

    def load(
        self,
        checkpoint: int | str | Path,
        wanted: Sequence[TensorPiece],
        *,
        model: ModelConfig | None = None,
    ) -> LoadedState:
        """Fill the `data` of every wanted piece from a step or path (see `find_checkpoint`).

        Any layout's pieces load from any other's: only the parts needed are read. Floating-point
        types are converted to that of `data`, rounding to nearest; other types must be equal. With
        `model`, the saved model must be the same up to `manifest.FREE_FIELDS`. Raises
        CheckpointError on all ranks if anything fails on any; `data` may then be half filled.
        """
        loaded: list[LoadedState] = []

        def work() -> int:
            path = self._find(checkpoint)
            manifest = directory.read_manifest(path)
            if model is not None:
                check_model(path, manifest, model)
            fill_pieces(path, manifest, [piece for piece in wanted if piece.numel])
            loaded.append(LoadedState(path, manifest))
            return manifest.step

        steps = self._together(f"loading {checkpoint}", work)
        if len(set(steps)) > 1:
            raise CheckpointError(f"loading {checkpoint}: the ranks found different steps: {steps}")
        return loaded[0]

    def _find(self, checkpoint: int | str | Path) -> Path:
        if isinstance(checkpoint, int):
            return directory.step_path(self.path, checkpoint)
        return directory.find_checkpoint(Path(checkpoint))

    def _plan(
        self, step: int, pieces: Iterable[TensorPiece], state: Mapping[str, Any], doing: str
    ) -> tuple[SavePlan, list[TensorPiece]]:
        """Exchange what every rank holds and agree on who writes what; nothing is written yet."""
        mine: list[TensorPiece] = []

        def describe() -> tuple[list[PieceInfo], dict[str, str], str]:
            mine.extend(piece for piece in pieces if piece.numel)
            return [piece_info(piece) for piece in mine], state_digests(state), secrets.token_hex(4)

        tables, digests, nonces = zip(*self._together(doing, describe), strict=True)
        for rank, entries in enumerate(digests):
            different = {name for name, _ in entries.items() ^ digests[0].items()}
            if different:
                raise CheckpointError(
                    f"{doing}: the training state must be the same on all ranks, but rank {rank}'s "
                    f"differs from rank 0's in {', '.join(sorted(different))}"
                )
        try:
            writes = assign_writers(tables)
        except CheckpointError as error:
            raise CheckpointError(f"{doing}: {error}") from error
        temporary = self.path / f".tmp-step-{step}-{nonces[0]}"
        return SavePlan(step, temporary, list(tables), writes), mine

    def _commit(
        self,
        plan: SavePlan,
        files: list[list[WrittenFile]],
        state: Mapping[str, Any],
        meta: SaveMeta,
    ) -> None:
        """On the first rank: write the manifest, make the checkpoint exist, delete surplus ones."""
        if self.world.index:
            return
        manifest = make_manifest(plan, files, state, meta)
        directory.commit(plan.temporary, directory.step_path(self.path, plan.step), manifest)
        directory.retain(self.path, self.keep, plan.step)

    def _together(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results; if it fails on any, all raise.

        Raises CheckpointError with the failed ranks' messages.
        """
        cause: Exception | None = None
        outcome: tuple[T | None, str | None]
        try:
            outcome = work(), None
        except Exception as error:
            cause, outcome = error, (None, _describe(error))
        outcomes = all_gather_object(outcome, self.world)
        failures = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
        if not failures:
            return [result for result, _ in outcomes]
        if len(set(failures.values())) == 1 and len(failures) == self.world.size:
            raise CheckpointError(f"{doing}: {failures[0]}") from cause
        lines = [f"rank {rank}: {text}" for rank, text in list(failures.items())[:8]]
        more = [f"and {len(failures) - 8} more ranks"] if len(failures) > 8 else []
        raise CheckpointError(f"{doing}: " + "; ".join(lines + more)) from cause


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
