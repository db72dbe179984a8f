"""One lane of a stream: records to tokens to samples, from any place in it.

A lane reads its documents, ends each with the end-of-document id, and cuts the run of tokens into
samples as a token file is cut: sample k is tokens `[k * seq_length, k * seq_length + seq_length]`,
both included, so a sample begins with the last token of the one before. At the end of an epoch the
tokens simply go on with the next one. Documents without a token are left out.

The place in a lane is that of the next sample's first token: the document it is in and how many of
its tokens were used. The `datasets` state from *before* that document is kept for it, so going on
means reading that document again.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megads.data.streaming_source import Records
from megads.errors import CheckpointError, DataError

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """A token of a lane. `state` is what `datasets` had before the block of documents it is in."""

    epoch: int = 0
    documents: int = 0
    """Documents of the epoch before the block, empty ones included."""
    state: dict[str, Any] | None = None
    """None at the beginning of an epoch."""
    skip: int = 0
    """Documents of the block that come before this one."""
    offset: int = 0
    """Tokens of this document that come before this one."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Place:
        """Raises CheckpointError for anything but what `to_dict` gives."""
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise CheckpointError(
                f"a place in the stream has {sorted(values)}, expected {sorted(expected)}"
            )
        return cls(**values)


class Sample(NamedTuple):
    """`tokens`, `[seq_length + 1]`, and the place where the next sample of the lane begins.

    `starts`, `[seq_length + 1]`: where in the sample the document of each token begins, 0 for the
    one that the first token is of.
    """

    tokens: Tokens
    starts: Tokens
    after: Place


@dataclass(frozen=True)
class LaneReader:
    """What all lanes of a stream do alike.

    `open(lane)` gives a lane's records from their beginning; `tokens_of(record)` a document's ids,
    end-of-document id included, none to leave it out. With `shuffle_buffer` above 1 each block of
    that many documents is permuted, a function of (seed, lane, epoch, block); a block at the end
    of an epoch may be smaller. Nothing is lost when a run goes on inside a block: it is read again.
    """

    open: Callable[[int], Records]
    tokens_of: Callable[[dict[str, Any]], Tokens]
    seq_length: int
    lanes: int
    shuffle_buffer: int
    seed: int
    name: str
    """Of the stream, for messages."""

    def samples(self, lane: int, start: Place) -> Iterator[Sample]:
        """Samples of a lane from a place on, without end.

        Raises DataError when the stream does, when a record holds no text, and when an epoch gives
        the lane no token. Raises CheckpointError if there is nothing at `start`.
        """
        documents = self._documents(lane, start)
        parts: deque[tuple[Place, Tokens]] = deque()
        used, available, length = start.offset, -start.offset, self.seq_length + 1
        resumed = start != Place()
        while True:
            while available < length:
                place, tokens = next(documents)
                if resumed:
                    self._check_start(lane, start, place, len(tokens))
                    resumed = False
                parts.append((place, tokens))
                available += len(tokens)
            pieces = [parts[0][1][used : used + length]]
            pieces += [tokens[:length] for _, tokens in islice(parts, 1, None)]
            sizes = [len(piece) for piece in pieces]
            starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)[:length]
            sample = np.concatenate(pieces)[:length]
            used += self.seq_length
            available -= self.seq_length
            while used >= len(parts[0][1]):
                used -= len(parts.popleft()[1])
            yield Sample(sample, starts, replace(parts[0][0], offset=used))

    def _documents(self, lane: int, start: Place) -> Iterator[tuple[Place, Tokens]]:
        """Documents that have tokens, each with the place of its first one, epoch after epoch."""
        epoch, begin = start.epoch, start
        while True:
            found = False
            for place, record in self._epoch(lane, begin):
                tokens = self._tokens(lane, place, record)
                if len(tokens):
                    found = True
                    yield place, tokens
            if not found and begin.state is None and begin.skip == 0:
                raise DataError(
                    f"{self.name}: lane {lane} of {self.lanes} has no text in epoch {epoch}; give "
                    f"the stream at least {self.lanes} documents or lower data.lanes={self.lanes}"
                )
            epoch += 1
            begin = Place(epoch)

    def _epoch(self, lane: int, begin: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
        """The rest of an epoch from a place on: records and the place of each one's beginning."""
        records = self.open(lane)
        records.set_epoch(self._epoch_seed(begin.epoch))
        if begin.state is not None:
            records.load_state_dict(copy.deepcopy(begin.state))
        block = replace(begin, skip=0, offset=0)
        iterator, skip = iter(records), begin.skip
        while True:
            texts = self._read(lane, block, iterator)
            if not texts:
                return
            order = self._order(lane, block, len(texts))
            for index in range(skip, len(texts)):
                yield replace(block, skip=index), texts[order[index]]
            skip = 0
            block = replace(
                block, documents=block.documents + len(texts), state=records.state_dict()
            )

    def _read(
        self, lane: int, block: Place, iterator: Iterator[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        try:
            return list(islice(iterator, max(1, self.shuffle_buffer)))
        except DataError:
            raise
        except Exception as error:  # readers of many formats, over a network or not
            where = f"after document {block.documents} of epoch {block.epoch}"
            raise DataError(
                f"{self.name}: lane {lane} of {self.lanes} cannot be read {where}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _tokens(self, lane: int, place: Place, record: dict[str, Any]) -> Tokens:
        try:
            return self.tokens_of(record)
        except DataError as error:
            number = place.documents + place.skip
            raise DataError(
                f"{error} (document {number} of lane {lane} of {self.lanes}, epoch {place.epoch})"
            ) from error

    def _order(self, lane: int, block: Place, count: int) -> Tokens:
        if self.shuffle_buffer <= 1:
            return np.arange(count)
        key = [self.seed, lane, block.epoch, block.documents]
        return np.random.default_rng(key).permutation(count)

    def _epoch_seed(self, epoch: int) -> int:
        """`datasets` orders the shards of an epoch by this number; 0 leaves them as given."""
        if self.shuffle_buffer <= 1:
            return 0
        text = f"megads stream shards: seed {self.seed}, epoch {epoch}".encode()
        return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=3).digest(), "little")

    def _check_start(self, lane: int, start: Place, found: Place, length: int) -> None:
        if found != replace(start, offset=0) or start.offset >= length:
            raise CheckpointError(
                f"{self.name}: lane {lane} was at token {start.offset} of document "
                f"{start.documents + start.skip} of epoch {start.epoch}, where there is none of "
                f"that length now; the data or the tokenizer is not what it was"
            )
