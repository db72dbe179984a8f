"""Microbatches of a step from token files.

A loader is a function of its arguments: which samples a step reads depends on the samples consumed
before it and on nothing that is remembered, so there is no loader state to save. Two loaders with
the same arguments return the same batches on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megads.config.schema import Config
from megads.data.blend import BlendedOrder
from megads.data.indexed import IndexedTokens
from megads.data.prepare import ResolvedData
from megads.data.sampler import (
    EpochOrder,
    EvaluationPlan,
    Ids,
    cut_for_validation,
    global_batch_positions,
    num_samples,
    rank_slice,
)
from megads.errors import DataError
from megads.parallel.batch import MicroBatch

Split = Literal["train", "valid"]


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

    def read(self, sample: int) -> NDArray[np.int64]:
        """The sample's seq_length + 1 token ids."""
        first = self.start + sample * self.seq_length
        return self.file.tokens[first : first + self.seq_length + 1].astype(np.int64)


class _Request(NamedTuple):
    consumed: int
    global_batch_size: int
    micro_batch_size: int
    dp_size: int
    dp_index: int


class TokenLoader:
    """Batches over one or several sources of a split.

    Without weights the sources are shuffled together as one: every sample exactly once per epoch.
    With weights they are blended, each going through epochs of its own. `vocab_size` is the
    model's; a token id beyond it raises DataError when its batch is read. Batches are put on
    `device`; the batch after the one asked for is read in the background.

    Raises DataError when the sources hold no sample.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        *,
        seed: int,
        vocab_size: int,
        weights: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sources = tuple(sources)
        self.seq_length = self.sources[0].seq_length
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        sizes = [source.num_samples for source in self.sources]
        self.num_samples = sum(sizes)
        """Distinct samples of all sources together."""
        if self.num_samples < 1:
            raise DataError(
                "; ".join(
                    f"{source.file.bin_path}: {source.stop - source.start} tokens in this split, a "
                    f"sample needs seq_length + 1 = {self.seq_length + 1}"
                    for source in self.sources
                )
            )
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._order: EpochOrder | BlendedOrder = (
            EpochOrder(self.num_samples, seed)
            if weights is None
            else BlendedOrder(weights, sizes, seed)
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="megads-data")
        self._ahead: tuple[_Request, Future[list[MicroBatch]]] | None = None

    def sample_ids(self, consumed: int, count: int) -> list[int]:
        """Ids of the `count` samples read after `consumed`; sources are numbered one after another.

        Independent of the layout; a resumed run reads the same ids as an uninterrupted one.
        """
        ids: list[int] = self._order.ids(global_batch_positions(consumed, count)).tolist()
        return ids

    def batches(
        self,
        consumed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_size: int,
        dp_index: int,
    ) -> list[MicroBatch]:
        """This data-parallel rank's microbatches of the step that begins after `consumed` samples.

        `MicroBatch.index` numbers the microbatches of the whole global batch and so is the same
        for a given sample whatever dp is.
        """
        request = _Request(consumed, global_batch_size, micro_batch_size, dp_size, dp_index)
        if self._ahead is not None and self._ahead[0] == request:
            result = self._ahead[1].result()
        else:
            result = self._read(request)
        following = request._replace(consumed=consumed + global_batch_size)
        self._ahead = (following, self._reader.submit(self._read, following))
        return result

    def evaluation_plan(self, steps: int, global_batch_size: int) -> EvaluationPlan:
        """How many samples an evaluation of at most `steps` global batches reads."""
        return EvaluationPlan.make(self.num_samples, steps, global_batch_size)

    def evaluation_batches(
        self,
        plan: EvaluationPlan,
        batch: int,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_size: int,
        dp_index: int,
    ) -> list[MicroBatch]:
        """Microbatches of the plan's global batch number `batch`: always the same samples.

        All ranks get the same number of microbatches; where the samples of the plan run out, a row
        has loss_mask 0 throughout. Raises ValueError for a batch that is not in the plan.
        """
        if not 0 <= batch < plan.num_batches:
            raise ValueError(f"batch {batch} of an evaluation of {plan.num_batches}")
        consumed = batch * global_batch_size
        request = _Request(consumed, global_batch_size, micro_batch_size, dp_size, dp_index)
        return self._read(request, counted=plan.samples)

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead = None
        self._reader.shutdown(cancel_futures=True)

    def _read(self, request: _Request, counted: int | None = None) -> list[MicroBatch]:
        positions = global_batch_positions(request.consumed, request.global_batch_size)
        mine = rank_slice(positions, request.micro_batch_size, request.dp_size, request.dp_index)
        first = request.dp_index * len(mine)
        tokens = self._tokens(mine.reshape(-1)).reshape(*mine.shape, -1)
        result = []
        for row, (ids, places) in enumerate(zip(tokens, mine, strict=True)):
            mask = None
            if counted is not None and places[-1] >= counted:
                weight = torch.from_numpy((places < counted).astype(np.float32))
                mask = weight[:, None].repeat(1, self.seq_length)
            result.append(
                MicroBatch(
                    tokens=self._place(torch.from_numpy(ids[:, :-1].copy())),
                    labels=self._place(torch.from_numpy(ids[:, 1:].copy())),
                    loss_mask=None if mask is None else self._place(mask),
                    index=first + row,
                )
            )
        return result

    def _tokens(self, positions: Ids) -> NDArray[np.int64]:
        """Token ids of the samples at these positions, `[positions, seq_length + 1]`, checked."""
        samples = self._order.ids(positions)
        sources = np.searchsorted(self._ends, samples, side="right")
        tokens = np.empty((len(samples), self.seq_length + 1), dtype=np.int64)
        for row, (sample, number) in enumerate(zip(samples, sources, strict=True)):
            source = self.sources[number]
            tokens[row] = source.read(int(sample - self._ends[number]) + source.num_samples)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            raise DataError(
                f"{self.sources[sources[row]].file.bin_path}: token id {tokens[row, column]} is "
                f"outside the model's vocabulary, model.vocab_size={self.vocab_size}; the file was "
                f"made with another tokenizer or vocab_size is too small"
            )
        return tokens

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def open_loader(
    config: Config, data: ResolvedData, split: Split, *, device: torch.device | str = "cpu"
) -> TokenLoader:
    """The loader of a run's training or validation samples.

    With `data.valid_paths` the training files are used whole and validation reads those files;
    otherwise each source gives its last `data.valid_fraction` to validation. `data.weights` blends
    training; validation takes every sample once, so that its loss does not depend on the blend.
    """
    own_files = bool(data.valid)
    prefixes = data.valid if own_files and split == "valid" else data.train
    part: Split = "train" if own_files else split
    sources = [
        TokenSource.open(
            prefix,
            config.train.seq_length,
            split=part,
            valid_fraction=0.0 if own_files else config.data.valid_fraction,
        )
        for prefix in prefixes
    ]
    try:
        return TokenLoader(
            sources,
            seed=config.train.seed,
            vocab_size=config.model.vocab_size,
            weights=config.data.weights if split == "train" else None,
            device=device,
        )
    except DataError as error:
        raise DataError(f"{split} data: {error}") from error
