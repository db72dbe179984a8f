"""Makes one rank of a run do something bad at one moment; see fault_test.py.

Python imports this module by itself in every process that finds its folder on PYTHONPATH. The
variable MEGADS_FAULT says what is to happen: the kind, the rank, the step (0: while the run is
built), the place in it (so many phases after its beginning, or its end where it has fewer) and
a file that is made then, so that it happens once, with the time in it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "MEGADS_FAULT"


def _raise() -> None:
    raise ValueError("an injected fault")  # in a collective, RuntimeErrors are of the network


def _enter_alone() -> None:
    """Enter a collective that no other rank enters."""
    import torch.distributed

    torch.distributed.barrier()


def _hold_interpreter() -> None:
    """Keep all other threads of this process from running."""
    while True:
        ctypes.PyDLL(None).sleep(10_000)


ACTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill supervisor": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": _enter_alone,
    "starve": lambda: time.sleep(10_000),
    "stuck disk": lambda: time.sleep(10_000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _hold_interpreter,
}


class Injection:
    """The fault, and where this process is on the way to it."""

    def __init__(self, kind: str, rank: int, step: int, place: int, marker: str) -> None:
        self.kind, self.rank, self.step, self.place = kind, rank, step, place
        self.marker = Path(marker)
        self.now, self.phases = -1, 0

    def begin(self, step: int) -> None:
        """A step begins; 0: the building of the run."""
        self.now, self.phases = step, 0

    def reached(self, *, end: bool = False) -> None:
        """A phase begins, or the step ends."""
        self.phases += 1
        if self.now == self.step and (end or self.phases > self.place):
            self.act()

    def act(self) -> None:
        """Do it, if this is the rank and it has not been done."""
        if os.environ.get("RANK") != str(self.rank):
            return
        try:
            with self.marker.open("x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return
        ACTS[self.kind]()


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Have `act` called with the arguments of each call of `owner.name`, before it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


Hook = Callable[[ModuleType], None]
"""What is done to a module once it has been imported."""


def _in_a_step(injection: Injection) -> dict[str, Hook]:
    """The fault is in the main thread, at the beginning of a phase."""

    def phases(module: ModuleType) -> None:
        for name in ("__call__", "waiting"):
            _before(module.Phases, name, lambda *args, **kwargs: injection.reached())

    def step(module: ModuleType) -> None:
        original = vars(module)["train_step"]

        def train_step(parts: Any, **kwargs: Any) -> Any:
            injection.begin(parts.state.step + 1)
            result = original(parts, **kwargs)
            injection.reached(end=True)
            return result

        vars(module)["train_step"] = train_step

    def build(module: ModuleType) -> None:
        def begin(*args: object) -> None:
            injection.begin(0)
            injection.reached(end=True)

        _before(module, "build", begin)

    return {
        "megads.parallel.phases": phases,
        "megads.train.step": step,
        "megads.train.build": build,
    }


def _in_reading(injection: Injection) -> dict[str, Hook]:
    """Reading the samples of the step never ends; that is a thread's work, some steps ahead."""

    def read(loader: object, request: Any) -> None:
        if request.consumed == (injection.step - 1) * request.global_batch_size:
            injection.act()

    return {"megads.data.loader": lambda module: _before(module.TokenLoader, "_read", read)}


def _in_writing(injection: Injection) -> dict[str, Hook]:
    """Writing the checkpoint of the step never ends; that is a thread's work."""

    def write(path: Path, *args: object) -> None:
        if f"step-{injection.step}-" in path.parent.name:
            injection.act()

    return {"megads.checkpoint.io": lambda module: _before(module, "write_blocks", write)}


class Finder:
    """Finds the modules that have hooks, and nothing else."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the import system asks of a finder."""
        hook = self._hooks.get(name)
        spec = PathFinder.find_spec(name, path, target) if hook is not None else None
        if hook is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if VARIABLE in os.environ:
    planned = Injection(**json.loads(os.environ[VARIABLE]))
    others = {"starve": _in_reading, "stuck disk": _in_writing}
    sys.meta_path.insert(0, Finder(others.get(planned.kind, _in_a_step)(planned)))
