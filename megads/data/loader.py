"""Microbatches of a step from token files.

A loader is a function of its arguments and its data plan: which samples a step reads depends on
the samples consumed before it and on nothing that is remembered. Two loaders with the same plan
return the same batches on every rank and after every resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megads.config.rampup import BatchRampup
from megads.config.schema import Config
from megads.data.microbatches import Rows, cut_rows, placed
from megads.data.order import DataOrder, Located
from megads.data.plan import DataPlan, Mixture, distinct
from megads.data.prepare import ResolvedData
from megads.data.sampler import (
    EvaluationPlan,
    Ids,
    global_batch_positions,
    rank_slice,
)
from megads.data.source import (
    Split,
    TokenSource,
    numbered,
    open_sources,
    require_samples,
    training_mixture,
    validation_names,
)
from megads.errors import DataError
from megads.parallel.batch import MicroBatch

STEPS_AHEAD = 3
"""Steps whose batches are read in the background."""


class _Request(NamedTuple):
    consumed: int
    global_batch_size: int
    micro_batch_size: int
    dp_size: int
    dp_index: int


class TokenLoader:
    """Batches over one or several sources of a split, in the order of a data plan.

    `mixture` None: each source by its size. `vocab_size` is the model's; a token id beyond it
    raises DataError when its batch is read. Batches are put on `device`; those of the next few
    steps are read in the background, of the size that `size_after(consumed)` says (None: of the
    size asked for last). With `document_mask` they say where documents begin, and the first token
    of one is no label in the loss. `names`: what the sources are called, () after their files.

    Raises DataError when the sources hold no sample, and as `DataPlan.begin`.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        *,
        seed: int,
        vocab_size: int,
        mixture: Mixture | None = None,
        size_after: Callable[[int], int] | None = None,
        device: torch.device | str = "cpu",
        document_mask: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.sources = tuple(sources)
        self.seq_length = self.sources[0].seq_length
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.document_mask = document_mask
        self._names = names
        self.num_samples = sum(source.num_samples for source in self.sources)
        """Distinct samples of all sources together."""
        require_samples(self.sources)
        self.planned = distinct([source.planned(seed) for source in self.sources])
        self.mixture = mixture or Mixture(None, (None,) * len(self.sources))
        self._size_after = size_after
        # A thread that pins memory would otherwise open a context on the first GPU as well.
        placing = (torch.cuda.set_device, (self.device,)) if self.device.type == "cuda" else ()
        self._reader = ThreadPoolExecutor(1, "megads-data", *placing)
        self._ahead: deque[tuple[_Request, Future[list[MicroBatch]]]] = deque()
        self.follow(DataPlan.begin(self.planned, self.mixture))

    def follow(self, plan: DataPlan) -> None:
        """Read in the order of this plan from now on; it may have sources that are not here."""
        self._ahead.clear()
        self.order = DataOrder(plan)
        numbers = {(s.identity, s.seed): n for n, s in enumerate(plan.sources)}
        self._files = {
            numbers[planned.identity, planned.seed]: source
            for planned, source in zip(self.planned, self.sources, strict=True)
        }

    @property
    def plan(self) -> DataPlan:
        return self.order.plan

    def position(self, consumed: int) -> int:
        """Position of the sample that is read next after `consumed` samples."""
        return self.plan.position(consumed)

    @property
    def names(self) -> list[str]:
        """A name for each of the plan's sources; numbered where files are called alike."""
        return numbered(self._names or [source.name for source in self.plan.sources])

    def sample_ids(self, consumed: int, count: int) -> list[int]:
        """Ids of the `count` samples read after `consumed`, the plan's sources one after another.

        Independent of the layout; a resumed run reads the same ids as an uninterrupted one.
        """
        offsets = np.cumsum([0, *(source.samples for source in self.plan.sources)])
        located = self._locate(global_batch_positions(consumed, count))
        ids: list[int] = (offsets[located.source] + located.sample).tolist()
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
        while self._ahead and self._ahead[0][0] != request:
            self._ahead.popleft()[1].cancel()
        result = self._ahead.popleft()[1].result() if self._ahead else self._read(request)
        for number in range(STEPS_AHEAD):
            request = self._following(request)
            if number >= len(self._ahead):
                self._ahead.append((request, self._reader.submit(self._read, request)))
        return [placed(batch, self.device) for batch in result]

    def evaluation_plan(self, steps: int, global_batch_size: int) -> EvaluationPlan:
        """The samples that an evaluation of at most `steps` global batches reads, by source.

        Each source has its share by size, but one sample at least: none is left out unseen.
        """
        samples = min(self.num_samples, steps * global_batch_size)
        least = [min(1, source.samples) for source in self.plan.sources]
        counts = np.maximum(self.order.counts(samples), least)
        return EvaluationPlan.make(counts.tolist(), global_batch_size)

    def evaluation_batches(
        self,
        plan: EvaluationPlan,
        batch: int,
        *,
        micro_batch_size: int,
        dp_size: int,
        dp_index: int,
    ) -> list[MicroBatch]:
        """Microbatches of the plan's batch number `batch`: always the same samples, of one source.

        All ranks get the same number of microbatches; where the samples of the batch run out, a row
        has loss_mask 0 throughout. Raises ValueError for a batch that is not in the plan.
        """
        if not 0 <= batch < plan.num_batches:
            raise ValueError(f"batch {batch} of an evaluation of {plan.num_batches}")
        part, unit = plan.batches[batch], micro_batch_size * dp_size
        rows = np.arange(-(-part.count // unit) * unit, dtype=np.int64)
        mine = rank_slice(rows, micro_batch_size, dp_size, dp_index)
        places = mine.reshape(-1)
        inside = part.first + np.minimum(places, part.count - 1)
        source = np.full_like(inside, part.source)
        located = Located(source, inside, self.order.samples(part.source, inside))
        read = Rows(self._gather(located), self._starts(located), places < part.count)
        batches = self._cut(read, micro_batch_size, first=dp_index * len(mine))
        return [placed(microbatch, self.device) for microbatch in batches]

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.clear()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _following(self, request: _Request) -> _Request:
        consumed, size = request.consumed + request.global_batch_size, request.global_batch_size
        if self._size_after is not None:
            size = self._size_after(consumed)
        return request._replace(consumed=consumed, global_batch_size=size)

    def _read(self, request: _Request) -> list[MicroBatch]:
        positions = global_batch_positions(request.consumed, request.global_batch_size)
        mine = rank_slice(positions, request.micro_batch_size, request.dp_size, request.dp_index)
        rows = Rows(self._tokens(mine.reshape(-1)), self._starts_at(mine.reshape(-1)))
        return self._cut(rows, request.micro_batch_size, first=request.dp_index * len(mine))

    def _cut(self, rows: Rows, size: int, *, first: int) -> list[MicroBatch]:
        return cut_rows(rows, size, first=first, pin=self.device.type == "cuda")

    def _locate(self, consumed: Ids) -> Located:
        return self.order.locate(self.order.positions(consumed))

    def _tokens(self, consumed: Ids) -> NDArray[np.int64]:
        """Token ids of the samples read after these numbers of others, `[consumed, seq + 1]`."""
        return self._gather(self._locate(consumed))

    def _starts_at(self, consumed: Ids) -> NDArray[np.int64] | None:
        return self._starts(self._locate(consumed)) if self.document_mask else None

    def _gather(self, located: Located) -> NDArray[np.int64]:
        """Token ids of samples, `[samples, seq_length + 1]`, checked against the vocabulary."""
        tokens = np.empty((located.sample.size, self.seq_length + 1), dtype=np.int64)
        for number in np.unique(located.source):
            here, source = located.source == number, self._files[int(number)]
            rows = source.read_many(located.sample[here])
            if rows.min() < 0 or rows.max() >= self.vocab_size:
                bad = rows[(rows < 0) | (rows >= self.vocab_size)][0]
                raise DataError(
                    f"{source.file.bin_path}: token id {bad} is outside the model's vocabulary, "
                    f"model.vocab_size={self.vocab_size}; the file was made with another tokenizer "
                    f"or vocab_size is too small"
                )
            tokens[here] = rows
        return tokens

    def _starts(self, located: Located) -> NDArray[np.int64] | None:
        """Document starts of samples, `[samples, seq_length + 1]`; None without a mask."""
        if not self.document_mask:
            return None
        pairs = zip(located.source.tolist(), located.sample.tolist(), strict=True)
        return np.stack([self._files[source].document_starts(sample) for source, sample in pairs])


def open_loader(
    config: Config, data: ResolvedData, split: Split, *, device: torch.device | str = "cpu"
) -> TokenLoader:
    """The loader of a run's training or validation samples; see `open_sources`.

    Weights, epochs, limits and skips are for training; validation takes every sample once, so that
    its loss does not depend on them.
    """
    sources = open_sources(config, data, split)
    if not sources:
        raise DataError(
            "a stream keeps nothing back for evaluation; name other texts or token files (--data, "
            "data.valid_paths)"
        )
    once = Mixture(None, tuple(source.num_samples for source in sources))
    train, training = config.train, split == "train"
    rampup = BatchRampup.make(train.batch_rampup, train.global_batch_size)
    try:
        return TokenLoader(
            sources,
            seed=train.seed,
            vocab_size=config.model.vocab_size,
            mixture=training_mixture(config, sources) if training else once,
            size_after=rampup.size_at if training else None,
            device=device,
            document_mask=config.data.document_mask,
            names=() if training else validation_names(config),
        )
    except DataError as error:
        raise DataError(f"{split} data: {error}") from error
