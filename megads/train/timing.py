"""How long steps take, by phase and rank, and the timeline of those that are profiled."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.config.operation import LoggingConfig
from megads.launch.activity import Activity
from megads.parallel import collectives
from megads.parallel.mesh import Mesh
from megads.parallel.phases import Durations, Span


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on this rank, in all and by phase."""

    seconds: float
    durations: Durations


class StepTimer:
    """Times the steps of this rank, tells `activity` what it is doing, and profiles chosen steps.

    A profiled step leaves `run.dir/profile/step-N/rank-R.json` of every rank: its phases, in
    seconds since a moment common to all; and for `logging.profile_ranks` beside it the trace of
    torch.profiler, `rank-R.trace.json`, which slows the step down.
    """

    def __init__(
        self, config: LoggingConfig, mesh: Mesh, run_dir: Path, activity: Activity | None
    ) -> None:
        self._config, self._mesh, self._activity = config, mesh, activity
        self._folder = run_dir / "profile"
        self._hosts: list[str] | None = None
        self.last: StepTime | None = None
        """Of the step that was made last."""
        self._own_s, self._steps = 0.0, 0
        self._saving_s = 0.0
        self._rank_times_s: list[float] = []

    def start(self) -> None:
        """Training begins: from now on a phase that does not end is a hang."""
        if self._activity is not None:
            self._activity.follow(self._mesh.phases)

    def stop(self, doing: str | None = None) -> None:
        """Training has ended: what comes now may take its time; without a word for it, what was
        being done when an error came stays."""
        if self._activity is None:
            return
        if doing is None:
            self._activity.stay()
        else:
            self._activity.doing(doing)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time what is inside as the step `number`."""
        if self._activity is not None:
            self._activity.step = number
            self._activity.refresh()
        profile = self._profiled(number) if number in self._config.profile_steps else None
        phases = self._mesh.phases
        with profile or contextlib.nullcontext():
            started = time.perf_counter()
            phases.begin()
            yield
            with phases.waiting("device"):
                collectives.synchronize(self._mesh.device)
            self.last = StepTime(time.perf_counter() - started, phases.end())
        self._own_s += self.last.durations.own_s
        self._steps += 1

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Training waits for a save meanwhile."""
        started = time.perf_counter()
        with self._mesh.phases.waiting("save"):
            yield
        self._saving_s += time.perf_counter() - started

    def taken(self) -> dict[str, float | list[float]]:
        """For the metrics, what there is since the last call: seconds that training has waited for
        saves, and each rank's own time if the ranks were compared."""
        values: dict[str, float | list[float]] = {"save_s": self._saving_s}
        if self._rank_times_s:
            values["rank_times_s"] = self._rank_times_s
        self._saving_s, self._rank_times_s = 0.0, []
        return values

    def compare_ranks(self) -> list[str]:
        """Compare the ranks' own work in a step since the last comparison; a note on each slow one.

        Own work is what a rank does not spend waiting for others: it tells those that make the
        others wait. Collective.
        """
        world = self._mesh.world
        mine = torch.tensor([self._own_s / self._steps], dtype=torch.float64)
        self._own_s, self._steps = 0.0, 0
        gathered = collectives.all_gather_dim0(mine.to(self._mesh.device), world).tolist()
        if self._hosts is None:
            self._hosts = collectives.all_gather_object(socket.gethostname(), world)
        coords = [self._mesh.layout.coords(rank) for rank in range(world.size)]
        found = slow_ranks(gathered, [c.pp for c in coords], self._config.slow_factor)
        self._rank_times_s = gathered
        return [
            f"rank {rank} (pp {coords[rank].pp}, dp {coords[rank].dp}, tp {coords[rank].tp}, on "
            f"{self._hosts[rank]}) is slow: {gathered[rank]:.3g} s of own work in a step, its "
            f"peers {median:.3g} s"
            for rank, median in found
        ]

    @contextlib.contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        mesh, folder = self._mesh, self._folder / f"step-{number}"
        rank = mesh.world.index
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*") if rank == 0 else ():  # maybe of more ranks than now
            old.unlink()
        traced = rank in self._config.profile_ranks
        with _torch_profiler(folder / f"rank-{rank}.trace.json", mesh.device, active=traced):
            collectives.barrier(mesh.world)
            started = time.perf_counter()
            mesh.phases.begin_trace()
            yield
            spans, seconds = mesh.phases.end_trace(), time.perf_counter() - started
        _write_timeline(folder / f"rank-{rank}.json", number, mesh, spans, seconds)


def slow_ranks(
    times: Sequence[float], stages: Sequence[int], factor: float
) -> list[tuple[int, float]]:
    """Ranks that take more than `factor` times the median of their stage's ranks, and that median.

    Stages differ in their work, so ranks are compared inside theirs; `stages[rank]` is its number.
    Of two medians the lower counts: of two ranks, one is slow beside the other. Where a stage has
    one rank, who is slow shows only against all ranks together.
    """
    found = []
    for rank, (seconds, stage) in enumerate(zip(times, stages, strict=True)):
        peers = [t for t, s in zip(times, stages, strict=True) if s == stage]
        median = statistics.median_low(peers if len(peers) > 1 else times)
        if seconds > factor * median:
            found.append((rank, median))
    return found


def _write_timeline(
    path: Path, step: int, mesh: Mesh, spans: Sequence[Span], seconds: float
) -> None:
    content = {
        "step": step,
        "rank": mesh.world.index,
        "coords": mesh.coords._asdict(),
        "seconds": seconds,
        "spans": [_plain(span) for span in spans],
    }
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _plain(span: Span) -> dict[str, str | int | float]:
    where = dict(zip(("chunk", "microbatch"), span.where, strict=False))
    return {"name": span.name, **where, "start_s": span.start_s, "end_s": span.end_s}


@contextlib.contextmanager
def _torch_profiler(path: Path, device: torch.device, *, active: bool) -> Iterator[None]:
    if not active:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
