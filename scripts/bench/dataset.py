"""Opening a dataset of very many documents, and reading samples of it at random.

    python scripts/bench/dataset.py [--documents 100] [--repeats 3] [--directory DIR] [--json F]

`--documents` is in millions. The tokens are a hole in a sparse file, so that the dataset takes no
more space than its index, 20 bytes a document; it is removed afterwards. Each figure is of a fresh
process with one thread: seconds and memory from before the file is opened until its first batch is
there (cold: the index was dropped from the page cache first), then samples per second on a file of
random tokens that is in the page cache. Prints medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megads.data.loader import TokenLoader
from megads.data.source import TokenSource
from megads.data.token_format import CHUNK, Header, write_index
from proc import memory_mb
from tokens import write_random_tokens

SEQ, VOCAB = 1024, 50257
BATCH, STEP = 8, 64
"""Samples of a microbatch and of a step."""
WARM_TOKENS = 50_000_000
SECONDS = 3.0


def lengths(documents: int) -> Iterator[NDArray[Any]]:
    """Documents of 128 to 896 tokens, in pieces."""
    for start in range(0, documents, CHUNK):
        yield 128 + np.arange(start, min(start + CHUNK, documents), dtype=np.int64) % 769


def write_sparse(prefix: Path, documents: int) -> None:
    """A dataset whose tokens are all 0 and take no space."""
    header = Header(np.dtype("<u2"), documents, documents + 1)
    marks = range(0, documents + 1, CHUNK)
    bounds = (np.arange(at, min(at + CHUNK, documents + 1)) for at in marks)
    write_index(prefix.with_suffix(".idx"), header, lambda: lengths(documents), bounds)
    total = sum(int(piece.sum()) for piece in lengths(documents))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * total)


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget a file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def loader(prefix: str) -> TokenLoader:
    """What a training run opens."""
    source = TokenSource.open(prefix, SEQ, split="train", valid_fraction=0.02)
    return TokenLoader([source], seed=1234, vocab_size=VOCAB)


def first_batch(prefix: str) -> dict[str, float]:
    """Seconds and MiB of opening a dataset and reading one batch."""
    own = os.getpid()
    memory, start = memory_mb(own, "VmRSS"), time.perf_counter()
    data = loader(prefix)
    data.batches(0, STEP, BATCH, 1, 0)
    seconds = time.perf_counter() - start
    data.close()
    peak = memory_mb(own, "VmHWM")
    return {"seconds": seconds, "added_mib": peak - memory, "before_mib": memory}


def random_samples(prefix: str) -> dict[str, float]:
    """Samples per second of CPU, all threads together, that are found, read, checked and cut."""
    data = loader(prefix)
    np.fromfile(data.sources[0].file.bin_path, np.uint8)  # into the page cache
    data.batches(0, STEP, BATCH, 1, 0)
    steps, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        steps += 1
        data.batches(steps * STEP, STEP, BATCH, 1, 0)
    data.close()
    return {"per_second": steps * STEP / spent}


FIGURES = {"first_batch": first_batch, "random_samples": random_samples}


def fresh(figure: str, prefix: Path) -> dict[str, float]:
    """The figures of a process of its own."""
    command = [sys.executable, __file__, "--figure", figure, "--prefix", str(prefix)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure(directory: Path, documents: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of everything."""
    sparse, warm = directory / "sparse", directory / "warm"
    write_sparse(sparse, documents)
    write_random_tokens(warm, vocab=VOCAB, count=WARM_TOKENS)
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "cached": [], "random": []}
    for _ in range(repeats):
        drop_cache(sparse.with_suffix(".idx"))
        runs["cold"].append(fresh("first_batch", sparse))
        runs["cached"].append(fresh("first_batch", sparse))
        runs["random"].append(fresh("random_samples", warm))
    return {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--documents", type=float, default=100, help="millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where to write (default: the system's)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", choices=FIGURES, help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figure:
        print(json.dumps(FIGURES[options.figure](options.prefix)))
        return
    documents = int(options.documents * 1e6)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = measure(Path(directory), documents, options.repeats)
    for name in ("cold", "cached"):
        print(
            f"first batch of {documents} documents, index {name}: "
            f"{result[name]['seconds']:.3f} s, {result[name]['added_mib']:.0f} MiB above the "
            f"{result[name]['before_mib']:.0f} MiB of an idle process"
        )
    print(
        f"random samples of {SEQ} tokens, cached: {result['random']['per_second']:.0f} a second "
        f"and core"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
