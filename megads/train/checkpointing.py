"""Between a run and its checkpoints: what is saved, and where a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megads.checkpoint.manifest import Manifest
from megads.config.schema import Config
from megads.errors import CheckpointError
from megads.train.build import RunParts


def resume(parts: RunParts) -> None:
    """Continue from the run's newest checkpoint, else start from `checkpoint.load`. Collective.

    With neither the run starts from its initial weights. `checkpoint.load_what=weights` takes
    the weights of `checkpoint.load` and nothing else: step 0, no moments.
    """
    config, optimizer = parts.config.checkpoint, parts.optimizer
    newest = parts.store.latest()
    if newest is None and config.load is None:
        return
    source = newest if newest is not None else Path(config.load or "")
    weights_only = newest is None and config.load_what == "weights"
    kinds = ("param",) if weights_only else optimizer.state_kinds
    _check_kinds(parts.store.read_manifest(source), kinds, source)
    wanted = list(optimizer.pieces(only_owned=False, kinds=kinds))
    loaded = parts.store.load(source, wanted, model=parts.config.model)
    optimizer.publish()
    parts.metrics.note(f"loaded {loaded.path}: step {loaded.step}")
    if weights_only:
        return
    run_id = parts.state.run_id
    optimizer.updates = int(loaded.state["optimizer_updates"])
    parts.scaler.load_state_dict(loaded.state["scaler"])
    parts.state.restore(loaded.state["train"])
    if newest is None:
        parts.state.run_id = run_id  # another run's checkpoint, but this run
    for change in _changes(loaded.state["data"], data_settings(parts.config)):
        parts.metrics.note(
            f"warning: {change} since the checkpoint was saved; samples now come in another "
            f"order, so some may be read again or left out"
        )


def save(parts: RunParts) -> None:
    """Write a checkpoint of the current step. Collective.

    Owned pieces only: over all ranks every element is written once, whatever the layout. Model
    weights are the fp32 masters.
    """
    parts.store.save(
        parts.state.step,
        parts.optimizer.pieces(only_owned=True),
        state={
            "train": parts.state.to_dict(),
            "scaler": parts.scaler.state_dict(),
            "optimizer_updates": parts.optimizer.updates,
            "data": data_settings(parts.config),
        },
        meta={"model": parts.config.model, "layout": parts.layout_sizes},
    )


def data_settings(config: Config) -> dict[str, Any]:
    """The settings that decide which tokens a number of consumed samples stands for."""
    data = config.data
    return {
        "train.seq_length": config.train.seq_length,
        "train.seed": config.train.seed,
        "data.paths": list(data.paths),
        "data.weights": None if data.weights is None else list(data.weights),
        "data.valid_fraction": data.valid_fraction,
        "data.valid_paths": list(data.valid_paths),
        "data.tokenizer": data.tokenizer,
        "data.append_eod": data.append_eod,
    }


def _changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        if saved.get(name) != value:
            yield f"{name} has changed from {saved.get(name)} to {value}"


def _check_kinds(manifest: Manifest, kinds: tuple[str, ...], source: int | Path) -> None:
    """Refuse a checkpoint of another optimizer with the way out, not with a missing tensor."""
    saved = {key.partition("/")[0] for key in manifest.tensors}
    missing = [kind for kind in kinds if kind not in saved]
    if missing:
        raise CheckpointError(
            f"checkpoint {source} holds {', '.join(sorted(saved))} but not {', '.join(missing)}: "
            f"it was trained with another optim.name or optim.momentum. To go on with its weights "
            f"alone, take a new run.dir and checkpoint.load=... checkpoint.load_what=weights"
        )
