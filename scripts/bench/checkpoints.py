"""Saving and loading, measured beside a plain copy, a raw write and torch.distributed.checkpoint.

    python scripts/bench/checkpoints.py [--millions 200] [--repeats 3] [--directory DIR] [--json F]

One process, fp32 weights and two moments (12 bytes per parameter). In each repeat everything is
measured once, in turn, so that a slow minute of the machine is everybody's. Prints medians and
their ratios. Reads are from the page cache, as after any save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megads.checkpoint.store import CheckpointStore
from megads.checkpoint.writer import SaveMeta
from megads.config.model import ModelConfig
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece

HIDDEN = 1024
SETTLE_S = 2.0
MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}
META: SaveMeta = {"model": ModelConfig.model_validate(MODEL), "layout": {}}
Times = dict[str, list[float]]


def tensors(millions: float) -> dict[str, Tensor]:
    """Weights of the shapes of a GPT, and two moments of each."""
    layers = max(1, round((millions * 1e6 - 23000 * HIDDEN) / (12 * HIDDEN**2)))
    shapes = {"embedding": (23000, HIDDEN)}
    for i in range(layers):
        shapes |= {
            f"{i}.qkv": (3 * HIDDEN, HIDDEN),
            f"{i}.out": (HIDDEN, HIDDEN),
            f"{i}.up": (4 * HIDDEN, HIDDEN),
            f"{i}.down": (HIDDEN, 4 * HIDDEN),
        }
    return {
        f"{kind}/{name}": torch.empty(shape).normal_()
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


def pieces(state: dict[str, Tensor]) -> list[TensorPiece]:
    """Whole tensors as pieces."""
    return [
        TensorPiece(key, t.dtype, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t)
        for key, t in state.items()
    ]


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Add the seconds that the block takes."""
    start = time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - start)


def raw_write(state: dict[str, Tensor], path: Path) -> None:
    """The same bytes to one file, and on the disk."""
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.view(-1).numpy()).cast("B")  # type: ignore[arg-type]
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def fsync_all(directory: Path) -> None:
    """What a peer that does not sync still owes before its files are as durable as ours."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def settle() -> None:
    """Let the kernel finish what is left of the one before, such as giving back deleted blocks."""
    os.sync()
    time.sleep(SETTLE_S)


def measure(state: dict[str, Tensor], place: Path, store: CheckpointStore, times: Times) -> None:
    """Everything once; files are new, and deleted by nobody while time is taken."""
    path: Path | None
    held, copy = pieces(state), {key: torch.empty_like(t) for key, t in state.items()}
    for tensor in copy.values():
        tensor.zero_()  # memory that is there, as that of a buffer used before
    settle()
    with timed(times, "copy"):
        for key, tensor in state.items():
            copy[key].copy_(tensor)
    del copy
    settle()
    with timed(times, "raw write + fsync"):
        raw_write(state, place / "raw")
    (place / "raw").unlink()
    settle()
    with timed(times, "megads durable"):
        with timed(times, "megads blocked"):
            store.begin(1, held, state={}, meta=META)
        path = store.wait()
    settle()
    with timed(times, "dcp durable"):
        with timed(times, "dcp blocked"):
            future = dcp.async_save(state, checkpoint_id=place / "dcp")
        future.result()  # type: ignore[union-attr]
        fsync_all(place / "dcp")
    settle()
    with timed(times, "megads load"):
        store.load(1, held)
    settle()
    with timed(times, "dcp load"):
        dcp.load(state, checkpoint_id=place / "dcp")
    shutil.rmtree(place / "dcp")
    shutil.rmtree(path)  # here, so that nobody's time holds the deletion of older files


def steps(seconds: float, goes_on: Callable[[], bool]) -> float:
    """Matrix products per second, for so long or as long as something goes on."""
    a, b, count, start = torch.randn(512, 512), torch.randn(512, 512), 0, time.perf_counter()
    while time.perf_counter() - start < seconds or goes_on():
        torch.mm(a, b)
        count += 1
    return count / (time.perf_counter() - start)


def throughput(state: dict[str, Tensor], store: CheckpointStore, times: Times) -> None:
    """A stand-in for training, without a save and with one in flight."""
    times.setdefault("work alone", []).append(steps(3, lambda: False))
    store.begin(1, pieces(state), state={}, meta=META)
    save = store._in_flight
    times.setdefault("work while saving", []).append(steps(0, lambda: not save.done()))
    shutil.rmtree(store.wait() or "")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=float, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="megads-bench-", dir=options.directory))
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=0, world_size=1)
    state, times = tensors(options.millions), {}
    store = CheckpointStore(place / "megads", Axis("world"), keep=1)
    try:
        measure(state, place, store, {})  # buffers are made and files are new: not counted
        for _ in range(options.repeats):
            measure(state, place, store, times)
            throughput(state, store, times)
    finally:
        shutil.rmtree(place)
    middle = {name: statistics.median(values) for name, values in times.items()}
    nbytes = sum(t.nbytes for t in state.values())
    print(f"{nbytes / 1e9:.2f} GB in one process, {torch.get_num_threads()} threads")
    for name, value in middle.items():
        unit = "products/s" if name.startswith("work") else f"s  {nbytes / value / 1e9:6.2f} GB/s"
        print(f"{name:20} {value:8.3f} {unit}   ({', '.join(f'{v:.3f}' for v in times[name])})")
    for one, other in (
        ("megads blocked", "copy"),
        ("megads blocked", "dcp blocked"),
        ("megads durable", "raw write + fsync"),
        ("megads durable", "dcp durable"),
        ("megads load", "dcp load"),
        ("work while saving", "work alone"),
    ):
        print(f"{one} / {other}: {middle[one] / middle[other]:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"bytes": nbytes, "times": times}, indent=1))


if __name__ == "__main__":
    main()
