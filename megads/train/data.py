"""The data of a run: its loaders, and the plan that a resumed one goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megads.checkpoint.exchange import together
from megads.config.schema import Config
from megads.config.streams import is_streamed
from megads.data.ledger import LEDGER, DataLedger, Rewind, read_rewinds
from megads.data.loader import TokenLoader, open_loader
from megads.data.order import DataOrder
from megads.data.plan import DataPlan
from megads.data.prepare import prepare_data
from megads.data.source import require_supply
from megads.data.streaming import StreamLoader, open_stream_loader
from megads.errors import DataError, told_by
from megads.parallel import collectives
from megads.parallel.mesh import Axis, Mesh
from megads.train.state import TrainState


@told_by("machine")
def build_loaders(
    config: Config, mesh: Mesh
) -> tuple[TokenLoader | StreamLoader, TokenLoader | None]:
    """Training and, if any is asked for, validation data. Collective.

    The first rank tokenizes what is not tokenized yet; the others then find it done. Raises
    DataError on all ranks if they do not see the same files.
    """
    if mesh.world.index == 0:
        prepare_data(config)
    collectives.barrier(mesh.world)
    data = prepare_data(config)
    train = (
        open_stream_loader(config, device=mesh.device)
        if is_streamed(config)
        else open_loader(config, data, "train", device=mesh.device)
    )
    valid = open_loader(config, data, "valid", device=mesh.device) if config.eval.every else None
    require_same_data([loader for loader in (train, valid) if loader is not None], mesh.world)
    return train, valid


def require_same_data(loaders: list[TokenLoader | StreamLoader], world: Axis) -> None:
    """Raise DataError on all ranks if one has token files of other content. Collective."""
    mine = [
        (planned.name, planned.identity)
        for loader in loaders
        if isinstance(loader, TokenLoader)
        for planned in loader.planned
    ]
    gathered = collectives.all_gather_object(mine, world)
    for rank, theirs in enumerate(gathered):
        for (name, identity), (_, other) in zip(gathered[0], theirs, strict=True):
            if identity != other:
                raise DataError(
                    f"{name}: rank {rank} reads other content ({other}) than rank 0 ({identity}); "
                    f"every node needs the same token files"
                )


def earlier_rewinds(config: Config, state: TrainState, world: Axis) -> list[Rewind]:
    """The rewinds that the run has made so far, as the first rank reads them. Collective.

    Raises CheckpointError on all ranks if it cannot.
    """

    def read() -> list[Rewind]:
        path = Path(config.run.dir) / LEDGER
        return [] if world.index else read_rewinds(path, state.run_id)

    return together(world, "reading which samples to leave out", read)[0]


def continue_plan(
    config: Config,
    loader: TokenLoader | StreamLoader,
    state: TrainState,
    rewinds: Sequence[Rewind] = (),
) -> list[str]:
    """Have the loader go on where `state` is: what was read stays, the rest is planned anew.

    What the rewinds leave out is read no more. Returns what to tell the user of. Raises DataError
    when `data.epochs` and `data.limits` do not allow as many samples as the run will read.
    """
    left_out = [(rewind.first, rewind.after) for rewind in rewinds]
    if not isinstance(loader, TokenLoader):
        loader.leave_out(left_out)
        return []
    mixture = replace(loader.mixture, skips=(*loader.mixture.skips, *left_out))
    notes: list[str] = []
    saved, fresh = state.data_plan, loader.plan
    if saved is not None or state.samples:
        before = fresh if saved is None else DataPlan.from_dict(saved)
        if saved is None:
            before, notes = _unrecorded(config, loader)
        plan = DataOrder(before).continued(loader.planned, mixture, state.samples)
        loader.follow(plan)
        notes += _changes(before, plan, plan.position(state.samples))
    require_supply(config, loader.plan, step=state.step, samples=state.samples)
    state.data_plan = loader.plan.to_dict()
    return notes


def start_ledger(config: Config, world: Axis) -> DataLedger:
    """The run's record of what was read; the first rank writes it."""
    return DataLedger(Path(config.run.dir) / LEDGER, writes=world.index == 0)


def _unrecorded(config: Config, loader: TokenLoader) -> tuple[DataPlan, list[str]]:
    """The plan of a checkpoint from before plans were saved, whose orders had other seeds."""
    seed, weights = config.train.seed, loader.mixture.weights
    notes = []
    if weights is None and len(loader.planned) > 1:
        notes.append(
            "warning: the checkpoint does not say in which order its sources were read; some "
            "samples may be read again or left out"
        )
    number = len(loader.planned)
    keys = [seed] if number == 1 else [(seed << 20) + n + 1 for n in range(number)]
    sources = [replace(s, key=key) for s, key in zip(loader.planned, keys, strict=True)]
    return DataPlan.begin(sources, loader.mixture), notes


def _changes(before: DataPlan, after: DataPlan, position: int) -> Iterator[str]:
    """What another plan means for the sources, in words."""
    last, now = before.segments[-1], after.segments[-1]
    if now.start != position or now == last:
        return
    number = len(before.sources)
    shares = [part / sum(now.parts) for part in now.parts]
    words = []
    for n, (source, share) in enumerate(zip(after.sources, shares, strict=True)):
        old = last.parts[n] / sum(last.parts) if n < number else 0.0
        if n >= number:
            words.append(f"{source.name} is new, at {share:.3g}")
        elif old and not share:
            words.append(f"{source.name} is no longer read")
        elif share != old:
            words.append(f"{source.name} from {old:.3g} to {share:.3g}")
    yield (
        f"data: planned anew from position {position} on: {', '.join(words) or 'other limits'}; "
        f"samples that were read are not read again in their epoch"
    )
