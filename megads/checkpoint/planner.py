"""All ranks agree on who writes what in a save."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megads.checkpoint.exchange import together
from megads.checkpoint.reshard import PieceInfo, assign_writers
from megads.checkpoint.writer import SavePlan, piece_info, state_digests
from megads.errors import CheckpointError
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece


class SavePlanner:
    """Plans the saves of one run, whose ranks hold the same pieces every time.

    What has not changed since the save before is neither sent nor planned again.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._tables: list[list[PieceInfo]] = [[] for _ in range(world.size)]
        self._writes: list[list[int]] = []

    def plan(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        state: Mapping[str, Any],
        directory: Path,
        doing: str,
    ) -> tuple[SavePlan, list[TensorPiece]]:
        """The plan, and this rank's pieces that are not empty; nothing is written yet. Collective.

        Raises CheckpointError on all ranks when the pieces do not fill every tensor exactly, or
        the state is not plain JSON and the same on all ranks.
        """
        mine: list[TensorPiece] = []

        def describe() -> tuple[list[PieceInfo] | None, dict[str, str], str]:
            mine.extend(piece for piece in pieces if piece.numel)
            table = [piece_info(piece) for piece in mine]
            is_known = bool(self._writes) and table == self._tables[self._world.index]
            return None if is_known else table, state_digests(state), secrets.token_hex(4)

        tables, digests, nonces = zip(*together(self._world, doing, describe), strict=True)
        _check_states(digests, doing)
        if any(table is not None for table in tables):
            whole = [
                old if new is None else new for old, new in zip(self._tables, tables, strict=True)
            ]
            try:
                self._writes = assign_writers(whole)
            except CheckpointError as error:
                raise CheckpointError(f"{doing}: {error}") from error
            self._tables = whole
        temporary = directory / f".tmp-step-{step}-{nonces[0]}"
        return SavePlan(step, temporary, self._tables, self._writes), mine


def _check_states(digests: Iterable[dict[str, str]], doing: str) -> None:
    first, *others = digests
    for rank, entries in enumerate(others, 1):
        different = {name for name, _ in entries.items() ^ first.items()}
        if different:
            raise CheckpointError(
                f"{doing}: the training state must be the same on all ranks, but rank {rank}'s "
                f"differs from rank 0's in {', '.join(sorted(different))}"
            )
