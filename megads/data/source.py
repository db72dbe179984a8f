"""The token files of a run as sources of samples: opened, known by content, enough. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from megads.config.data_files import source_name
from megads.config.rampup import BatchRampup
from megads.config.schema import Config
from megads.data.documents import document_starts
from megads.data.indexed import IndexedTokens
from megads.data.plan import DataPlan, Mixture, PlannedSource
from megads.data.prepare import ResolvedData
from megads.data.sampler import Ids, cut_for_validation, num_samples
from megads.errors import DataError

Split = Literal["train", "valid"]
T = TypeVar("T")
PROBES, PROBE_BYTES = 16, 4096
"""Evenly spaced pieces of a file, the first and the last bytes among them."""


@dataclass(frozen=True)
class TokenSource:
    """The tokens `[start, stop)` of a file, cut into samples of seq_length + 1 tokens."""

    file: IndexedTokens
    start: int
    stop: int
    seq_length: int

    @classmethod
    def open(
        cls, prefix: str, seq_length: int, *, split: Split, valid_fraction: float
    ) -> TokenSource:
        """One split of a file; see `cut_for_validation` for where the file is cut."""
        file = IndexedTokens(prefix)
        cut = cut_for_validation(
            file.num_tokens, file.num_documents, file.document_start, valid_fraction
        )
        start, stop = (0, cut) if split == "train" else (cut, file.num_tokens)
        return cls(file, start, stop, seq_length)

    @property
    def num_samples(self) -> int:
        return num_samples(self.stop - self.start, self.seq_length)

    @cached_property
    def _windows(self) -> NDArray[Any]:
        """Every run of seq_length + 1 tokens of the file: a view, nothing is read."""
        return sliding_window_view(self.file.tokens, self.seq_length + 1)

    def read(self, sample: int) -> NDArray[np.int64]:
        """The sample's seq_length + 1 token ids."""
        return self.read_many(np.asarray([sample]))[0].astype(np.int64)

    def read_many(self, samples: Ids) -> NDArray[Any]:
        """Token ids of these samples in the file's number type, `[samples, seq_length + 1]`."""
        rows: NDArray[Any] = self._windows[self.start + samples * self.seq_length]
        return rows

    def document_starts(self, sample: int) -> NDArray[np.int64]:
        """Where in the sample the document of each of its seq_length + 1 tokens begins."""
        first = self.start + sample * self.seq_length
        return document_starts(self.file, first, self.seq_length + 1)

    def planned(self, seed: int) -> PlannedSource:
        """The source in a data plan: known by what it holds, so that files may move."""
        name = Path(self.file.prefix).name
        return PlannedSource.make(name, self.identity, self.num_samples, seed)

    @cached_property
    def identity(self) -> str:
        """A digest of the files' sizes and pieces, number type, token range and sample length."""
        digest = hashlib.blake2b(digest_size=16)
        shape = (self.file.dtype.str, self.start, self.stop, self.seq_length)
        digest.update(repr(shape).encode())
        for path in (self.file.idx_path, self.file.bin_path):
            digest.update(f" {path.stat().st_size} ".encode())
            for piece in _pieces(path):
                digest.update(piece)
        return digest.hexdigest()


def open_sources(config: Config, data: ResolvedData, split: Split) -> list[TokenSource]:
    """The token files of a split.

    With `data.valid_paths` the training files are used whole and validation reads those files, of
    which each must have a sample; otherwise each source gives its last `data.valid_fraction` to
    validation.
    """
    own_files = bool(data.valid)
    sources = [
        TokenSource.open(
            prefix,
            config.train.seq_length,
            split="train" if own_files else split,
            valid_fraction=0.0 if own_files else config.data.valid_fraction,
        )
        for prefix in (data.valid if own_files and split == "valid" else data.train)
    ]
    if own_files and split == "valid":
        for source in sources:
            require_samples([source])
    return sources


def validation_names(config: Config) -> tuple[str, ...]:
    """What the sets of validation are called: `data.valid_names`, else as their files."""
    data = config.data
    return data.valid_names or tuple(map(source_name, data.valid_paths or data.paths))


def numbered(names: Sequence[str]) -> list[str]:
    """The names with numbers at those that occur more than once; `all` means all together."""
    taken = {name for name in names if names.count(name) == 1} | {"all"}
    unique = []
    for name in names:
        if names.count(name) > 1 or name == "all":
            name = next(f"{name}-{n}" for n in count(1) if f"{name}-{n}" not in taken)
            taken.add(name)
        unique.append(name)
    return unique


def require_samples(sources: Sequence[TokenSource]) -> None:
    """Raise DataError when the sources hold no sample, with what each of them has."""
    if any(source.num_samples for source in sources):
        return
    raise DataError(
        "; ".join(
            f"{source.file.bin_path}: {source.stop - source.start} tokens in this split, a sample "
            f"needs seq_length + 1 = {source.seq_length + 1}"
            for source in sources
        )
    )


def training_mixture(config: Config, sources: Sequence[TokenSource]) -> Mixture:
    """What the configuration says about the sources; one value counts for all of them."""
    data, number = config.data, len(sources)
    epochs, limits = _for_each(data.epochs, number), _for_each(data.limits, number)
    most: list[int | None] = []
    for source, epoch, limit in zip(sources, epochs, limits, strict=True):
        whole = None if epoch is None else int(epoch * source.num_samples)
        most.append(min((n for n in (whole, limit) if n is not None), default=None))
    return Mixture(data.weights, tuple(most), data.skip)


def require_supply(config: Config, plan: DataPlan, *, step: int, samples: int) -> None:
    """Raise DataError if the plan's limits end before the run does.

    The run has done `step` steps with `samples` samples.
    """
    supply, steps = plan.supply(), config.train.steps - step
    if supply is None or steps <= 0:
        return
    train = config.train
    rampup = BatchRampup.make(train.batch_rampup, train.global_batch_size)
    total = rampup.consumed_after(steps, samples)
    needed = plan.position(total - 1) + 1
    if needed > supply:
        skipped = needed - total
        raise DataError(
            f"train.steps={train.steps} needs {needed} samples"
            + (f", {skipped} skipped ones included," if skipped else "")
            + f" but data.epochs and data.limits allow {supply}; raise them or lower train.steps"
        )


def check_sources(config: Config, data: ResolvedData, *, is_new: bool) -> None:
    """Find out before any worker starts what they would refuse: the files, and too few samples.

    A run that is not new goes on with a plan of its own, which only the workers see.
    """
    if config.eval.every:
        require_samples(open_sources(config, data, "valid"))
    if not data.train:
        return
    sources = open_sources(config, data, "train")
    require_samples(sources)
    if is_new:
        planned = [source.planned(config.train.seed) for source in sources]
        plan = DataPlan.begin(planned, training_mixture(config, sources))
        require_supply(config, plan, step=0, samples=0)


def _for_each(values: tuple[T | None, ...] | None, number: int) -> tuple[T | None, ...]:
    if values is None or len(values) == 1:
        return (values or (None,)) * number
    return values


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        last = max(0, path.stat().st_size - PROBE_BYTES)
        for number in range(PROBES):
            file.seek(last * number // (PROBES - 1))
            yield file.read(PROBE_BYTES)
