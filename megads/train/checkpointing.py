"""Between a run and its checkpoints: what is saved, and where a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megads.checkpoint.directory import foreign_files, step_of, uncommitted
from megads.checkpoint.manifest import COMMIT, Manifest
from megads.checkpoint.store import LoadedState
from megads.config.schema import Config
from megads.data.streaming import StreamLoader
from megads.errors import CheckpointError, DamageError, LostRanksError
from megads.train.build import RunParts
from megads.train.data import continue_plan, earlier_rewinds


def resume(parts: RunParts) -> None:
    """Continue from the run's newest checkpoint, else start from `checkpoint.load`. Collective.

    With neither the run starts from its initial weights. `checkpoint.load_what` is about
    `checkpoint.load` alone: "weights" takes nothing else (step 0, no moments), "optimizer" also the
    optimizer's state (step 0). A damaged checkpoint is passed over for the one before it, said
    loudly, or ends the run (`checkpoint.on_damage`). Raises CheckpointError.
    """
    config, store = parts.config.checkpoint, parts.store
    own = store.candidates()
    if own or config.load is not None:
        _resume_from(parts, own)
    parts.rewinds[:] = earlier_rewinds(parts.config, parts.state, parts.mesh.world)
    for note in continue_plan(parts.config, parts.loader, parts.state, parts.rewinds):
        parts.metrics.note(note)


def has_way_back(parts: RunParts) -> bool:
    """Whether a rewind would find a checkpoint, or none is ever made. Collective."""
    train = parts.config.train
    return "rewind" not in (train.nonfinite, train.spike) or bool(parts.store.candidates())


def go_back(parts: RunParts, *, before: int, wanted: int) -> None:
    """Go on from an own checkpoint of a step before `before`. Collective.

    From the newest whole one of step `wanted` or less; where none is kept that is so old, from the
    oldest. The newer ones are set aside. Raises CheckpointError when there is none.
    """
    _wait(parts)
    own = parts.store.candidates()
    good = [path for path in own if step_of(path) <= wanted]
    late = [path for path in reversed(own) if wanted < step_of(path) < before]
    if not good and not late:
        raise CheckpointError(f"there is no checkpoint in {parts.store.path} to go back to")
    loaded, damaged = _load_first(parts, [*good, *late], parts.optimizer.state_kinds)
    newer = [path for path in own if step_of(path) > loaded.step]
    parts.store.set_aside([*newer, *(path for path in damaged if path not in newer)])
    parts.optimizer.publish()
    _take_over(parts, loaded.state, progress=True, own=True)


def _resume_from(parts: RunParts, own: list[Path]) -> None:
    """Load from the newest whole checkpoint of the run's own, else from `checkpoint.load`."""
    config, store = parts.config.checkpoint, parts.store
    what = "all" if own else config.load_what
    kinds = ("param",) if what == "weights" else parts.optimizer.state_kinds
    loaded, damaged = _load_first(parts, own or store.candidates(Path(config.load or "")), kinds)
    if own and damaged:
        store.set_aside(damaged)
    parts.optimizer.publish()
    parts.metrics.note(f"loaded {loaded.path}: step {loaded.step}")
    _name_strangers(parts, loaded)
    if what != "weights":
        _take_over(parts, loaded.state, progress=what == "all", own=bool(own))


def _load_first(
    parts: RunParts, candidates: list[Path], kinds: tuple[str, ...]
) -> tuple[LoadedState, list[Path]]:
    """Load the first candidate that is whole; the damaged ones before it."""
    wanted = list(parts.optimizer.pieces(only_owned=False, kinds=kinds))
    damaged: list[Path] = []
    for path in candidates:
        try:
            loaded = parts.store.load(
                path,
                wanted,
                model=parts.config.model,
                check=partial(_check_kinds, kinds=kinds, source=path),
            )
        except DamageError as error:
            if parts.config.checkpoint.on_damage == "stop":
                raise DamageError(
                    f"{error}. checkpoint.on_damage=previous would take an older checkpoint"
                ) from error
            parts.metrics.note(f"WARNING: {error}")
            damaged.append(path)
            continue
        if damaged:
            parts.metrics.note(
                f"WARNING: {len(damaged)} newer checkpoint{'s' * (len(damaged) > 1)} cannot be "
                f"used; the run goes back to step {loaded.step}"
            )
        return loaded, damaged
    raise DamageError(f"no checkpoint is whole: {', '.join(map(str, candidates))} are all damaged")


def _name_strangers(parts: RunParts, loaded: LoadedState) -> None:
    """Tell of files that are not the checkpoint's and of saves that never ended."""
    if parts.mesh.world.index:
        return
    strange = foreign_files(loaded.path, loaded.manifest)
    if strange:
        parts.metrics.note(f"ignored in {loaded.path}, not part of it: {', '.join(strange)}")
    never_ended = uncommitted(loaded.path.parent)
    if never_ended:
        parts.metrics.note(
            f"ignored in {loaded.path.parent}, without a {COMMIT} file: {', '.join(never_ended)}"
        )


def _take_over(parts: RunParts, saved: dict[str, Any], *, progress: bool, own: bool) -> None:
    """Restore the training state; a checkpoint made by other software has less of it."""
    run_id = parts.state.run_id
    parts.optimizer.updates = int(saved.get("optimizer_updates", 0))
    if "scaler" in saved:
        parts.scaler.load_state_dict(saved["scaler"])
    if not progress:
        return
    if "train" in saved:
        parts.state.restore(saved["train"])
    if "guard" in saved:
        parts.guard.load_state_dict(saved["guard"])
    if not own:
        parts.state.run_id = run_id  # another run's checkpoint, but this run
    if isinstance(parts.loader, StreamLoader):
        parts.loader.load_state_dict(saved.get("stream"), parts.state.samples)
    for change in _changes(saved.get("data", {}), data_settings(parts.config)):
        parts.metrics.note(
            f"warning: {change} since the checkpoint was saved; samples now come in another "
            f"order, so some may be read again or left out"
        )


def save(parts: RunParts) -> None:
    """Begin a checkpoint of the current step, and end it if saving is not asynchronous. Collective.

    Owned pieces only: over all ranks every element is written once, whatever the layout. Model
    weights are the fp32 masters. A save in flight is waited for first. Raises CheckpointError on
    all ranks if one has failed and `checkpoint.on_error=stop`.
    """
    _wait(parts)
    parts.store.begin(
        parts.state.step,
        parts.optimizer.pieces(only_owned=True),
        state={
            "train": parts.state.to_dict(),
            "scaler": parts.scaler.state_dict(),
            "guard": parts.guard.state_dict(),
            "optimizer_updates": parts.optimizer.updates,
            "data": data_settings(parts.config),
            **_stream_state(parts),
        },
        meta={"model": parts.config.model, "layout": parts.layout_sizes},
    )
    if not parts.config.checkpoint.async_save:
        parts.store.until_ended()
        if parts.config.checkpoint.on_error == "stop":
            parts.store.wait()  # else a failure is met later, and told of unless this was the last


def _stream_state(parts: RunParts) -> dict[str, Any]:
    """Where a stream is; what comes next in token files needs no more than a number."""
    if not isinstance(parts.loader, StreamLoader):
        return {}
    return {"stream": parts.loader.state_dict(parts.mesh.dp)}


def must_stop(parts: RunParts) -> bool:
    """Whether this rank knows of a failed save that ends the run; else a failure is told of."""
    if not parts.store.failed:
        return False
    if parts.config.checkpoint.on_error == "continue":
        _wait(parts)
        return False
    return True


def finish(parts: RunParts) -> None:
    """Return when the last save is on the disk. Raises CheckpointError if it failed."""
    parts.store.wait()


def settle(parts: RunParts) -> None:
    """Let a save in flight end before the process does, whatever else has stopped the run."""
    try:
        parts.store.wait()
    except CheckpointError as error:
        parts.metrics.note(f"WARNING: {error}")


def _wait(parts: RunParts) -> None:
    """Wait for a save in flight; if it failed, tell of it or raise."""
    try:
        parts.store.wait()
    except CheckpointError as error:
        if parts.config.checkpoint.on_error == "stop" or isinstance(error, LostRanksError):
            raise
        parts.metrics.note(f"WARNING: {error}. Training goes on (checkpoint.on_error=continue)")


def data_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what the samples of a source are, and their order."""
    data = config.data
    return {
        "train.seq_length": config.train.seq_length,
        "train.seed": config.train.seed,
        "data.valid_fraction": data.valid_fraction,
        "data.valid_paths": list(data.valid_paths),
        "data.tokenizer": data.tokenizer,
        "data.append_eod": data.append_eod,
    }


def _changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What is not as it was; a checkpoint that does not say how it was has no changes."""
    for name, value in now.items() if saved else ():
        if saved.get(name) != value:
            yield f"{name} has changed from {saved.get(name)} to {value}"


def _check_kinds(manifest: Manifest, *, kinds: tuple[str, ...], source: Path) -> None:
    """Refuse a checkpoint of another optimizer with the way out, not with a missing tensor."""
    saved = {key.partition("/")[0] for key in manifest.tensors}
    missing = [kind for kind in kinds if kind not in saved]
    if saved == {"param"} and missing:
        raise CheckpointError(
            f"checkpoint {source} holds weights alone, no {', '.join(missing)}; start from them "
            f"with checkpoint.load_what=weights"
        )
    if missing:
        raise CheckpointError(
            f"checkpoint {source} holds {', '.join(sorted(saved))} but not {', '.join(missing)}: "
            f"it was trained with another optim.name or optim.momentum. To go on with its weights "
            f"alone, take a new run.dir and checkpoint.load=... checkpoint.load_what=weights"
        )
