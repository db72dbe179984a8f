"""Persistent pools of worker processes, so that a test of a collective costs milliseconds.

A pool of `n` processes is started once per world size, joins one gloo process group, and then runs
one module-level function after another on all ranks. In between it stands still (SIGSTOP): the
threads of an idle group wake up a hundred times a second each. Every call has a hard time limit: a
hang is a failing result that shows where each rank was, and the pool is thrown away afterwards, as
after any failure, because ranks that stopped halfway through a collective cannot be trusted again.

    def sums(rank, world_size, value):
        mesh = mesh_for(ParallelLayout(tp=world_size), rank)
        return all_reduce(torch.tensor(value * rank), mesh.tp).item()

    def test_sum(workers):
        assert workers(4).run(sums, 10) == [60, 60, 60, 60]
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megads.parallel.layout import ParallelLayout
    from megads.parallel.mesh import Mesh

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["megads.train.loop", "torch._dynamo", "tests.distributed"])
"""What takes seconds to import; recomputing activations imports torch._dynamo."""
START_TIMEOUT_S = 120.0
KEPT_MESHES = 2
PR_SET_PDEATHSIG = 1
GRACE_S = 3.0
"""How long the other ranks get to finish once one has failed."""


class RemoteFailure(AssertionError):
    """Some ranks raised, died or hung; the message holds every rank's traceback or stack."""


_meshes: dict[tuple[ParallelLayout, int | None, int], Mesh] = {}


def mesh_for(
    layout: ParallelLayout,
    rank: int,
    num_kv_heads: int | None = None,
    *,
    zero_shard_size: int = 1,
) -> Mesh:
    """The mesh of `layout` in this worker; the last few stay for later calls.

    Collective over the ranks of the layout, which must be all of the pool's. Older meshes are
    closed: the threads of an idle group wake up all the time, of a hundred they fill a core.
    """
    from megads.parallel.mesh import Mesh

    key = layout, num_kv_heads, zero_shard_size
    mesh = _meshes.pop(key, None)
    if mesh is None:
        while len(_meshes) >= KEPT_MESHES:
            _meshes.pop(next(iter(_meshes))).close()
        mesh = Mesh.build(layout, rank, num_kv_heads=num_kv_heads, zero_shard_size=zero_shard_size)
    _meshes[key] = mesh
    return mesh


class WorkerPool:
    """`world_size` processes that share a gloo process group; made by the `workers` fixture."""

    def __init__(self, world_size: int) -> None:
        from torch.distributed import TCPStore

        self.world_size = world_size
        # Ranks that wait for one another look into a store that is a file every 10 ms only.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._dir = Path(tempfile.mkdtemp(prefix="megads-test-pool-"))
        self._links: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            self._start(rank)
        self._collect("starting the pool", START_TIMEOUT_S)
        self._signal(signal.SIGSTOP)

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank; its results in rank order.

        Raises RemoteFailure when a rank raises or dies, or when `timeout` seconds pass.
        """
        request = pickle.dumps((sys.path, fn.__module__, fn.__qualname__, pickle.dumps(args)))
        self._signal(signal.SIGCONT)
        for link in self._links:
            link.send_bytes(request)
        results = self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)
        self._signal(signal.SIGSTOP)
        return results

    def close(self) -> None:
        """End the processes; idle ones leave by themselves, others are killed."""
        self._signal(signal.SIGCONT)
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=2.0)
        self._kill()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _start(self, rank: int) -> None:
        ours, theirs = FORKS.Pipe()
        args = theirs, rank, self.world_size, self._dir, self._store.port
        process = FORKS.Process(target=_worker, args=args, daemon=True)
        process.start()
        theirs.close()
        self._links.append(ours)
        self._processes.append(process)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        waiting = {link: rank for rank, link in enumerate(self._links)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                rank = waiting.pop(link)  # type: ignore[arg-type]
                try:
                    ok, value = pickle.loads(link.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    ok, value = False, f"the process died with status {self._status(rank)}"
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures and not waiting:
            return [results[rank] for rank in range(self.world_size)]
        raise RemoteFailure(self._report(what, timeout, failures, sorted(waiting.values())))

    def _report(self, what: str, timeout: float, failures: dict[int, str], hung: list[int]) -> str:
        """Describe a failed call, then throw the pool away."""
        if hung:
            self._signal(signal.SIGUSR2)
            time.sleep(0.5)
        parts = [f"{what} failed on {len(failures)} of {self.world_size} ranks"]
        if hung and not failures:
            parts = [f"{what} did not finish within {timeout:g} s on ranks {hung}"]
        parts += [f"--- rank {rank} raised\n{failures[rank]}" for rank in sorted(failures)]
        for rank in hung:
            stack = (self._dir / f"stack-{rank}").read_text(errors="replace")
            parts.append(f"--- rank {rank} was still in\n{stack}")
        for rank in sorted({*failures, *hung}):
            output = (self._dir / f"output-{rank}").read_text(errors="replace")[-2000:]
            if output.strip():
                parts.append(f"--- output of rank {rank}\n{output}")
        self._kill()
        return "\n".join(parts)

    def _status(self, rank: int) -> int | None:
        self._processes[rank].join(timeout=2.0)
        return self._processes[rank].exitcode

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for link in self._links:
            link.close()
        self._links, self._processes = [], []
        shutil.rmtree(self._dir, ignore_errors=True)


class Workers:
    """Hands out one pool per world size and keeps the number of processes bounded."""

    def __init__(self, max_processes: int = 16) -> None:
        self.max_processes = max_processes
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, world_size: int) -> WorkerPool:
        pool = self._pools.pop(world_size, None)
        if pool is not None and not pool.alive:
            pool.close()
            pool = None
        if pool is None:
            while self._pools and sum(self._pools) + world_size > self.max_processes:
                self._pools.pop(next(iter(self._pools))).close()
            pool = WorkerPool(world_size)
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _resolve(module: str, qualname: str) -> Callable[..., Any]:
    import importlib

    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))  # type: ignore[return-value]


def _worker(link: Connection, rank: int, world_size: int, directory: Path, port: int) -> None:
    gc.freeze()  # a collection would copy the pages that all forks share
    output = os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stack = (directory / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_the_tests()

    def answer(work: Callable[[], Any]) -> None:
        try:
            reply = pickle.dumps((True, work()))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        link.send_bytes(reply)

    answer(lambda: _join(rank, world_size, port))
    while True:
        try:
            path, module, qualname, args = pickle.loads(link.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        answer(lambda: _call(_resolve(module, qualname), rank, world_size, args))  # noqa: B023


def _end_with_the_tests() -> None:
    """Who stands still does not see that the tests were killed: the server of forks ends with them,
    once nobody else holds its pipe, and its end kills this process."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _join(rank: int, world_size: int, port: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )


def _call(fn: Callable[..., Any], rank: int, world_size: int, args: bytes) -> Any:
    """One call; the seed is set so that results do not depend on earlier calls.

    Groups that a failed run has left are destroyed. Cycles are collected, because a process group
    in one keeps its threads, and what is left is frozen: no later collection looks at it again.
    """
    import torch

    torch.manual_seed(0)
    try:
        return fn(rank, world_size, *pickle.loads(args))
    finally:
        _destroy_strays()
        gc.collect()
        gc.freeze()


def _destroy_strays() -> None:
    import torch.distributed as dist

    kept = {dist.group.WORLD, *(group for mesh in _meshes.values() for group in mesh.groups)}
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
