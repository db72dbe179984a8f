"""Which tokens a sample holds, and which samples a step reads: arithmetic on positions only.

The order, in full. A split of a source is one run of tokens. Sample k is its tokens
`[k * seq_length, k * seq_length + seq_length]`, both ends included: seq_length + 1 ids, of which
the last is only a label and is the first token of sample k + 1. So each token but the first is a
label exactly once per epoch, and only a tail shorter than seq_length is left out. Training reads a
stream of *positions* 0, 1, 2, ...; position p belongs to epoch `p // num_samples`, and each epoch
visits every sample once, in its own permutation, a function of (seed, epoch, num_samples). A step
that starts after `consumed` samples reads the positions `[consumed, consumed + global_batch_size)`.
Nothing else enters: not the layout, the micro batch, nor how often the run was resumed.

This differs from Megatron-LM, which shuffles documents before cutting samples (so samples of later
epochs start elsewhere) and lets the last epochs mix; the same seed gives other samples there.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_ROUNDS = 8
_EPOCHS = 2**40
"""More epochs than any source goes through."""


def num_samples(num_tokens: int, seq_length: int) -> int:
    """Samples in a run of tokens: `max(0, (num_tokens - 1) // seq_length)`."""
    return max(0, (num_tokens - 1) // seq_length)


def samples_of(source: Ids, positions: Ids, sizes: Sequence[int], seeds: Sequence[int]) -> Ids:
    """Sample ids at positions of the endless streams of sources, int64 of the same shape.

    `source`: which one each position is of; `sizes`, `seeds`: of each source. A source gives each
    of its samples, at least one, once in every epoch. The permutation of an epoch is a balanced
    Feistel network over the next power of two, walked until it lands inside the range (Black and
    Rogaway 2002): constant memory, any position in constant time, so resuming at any sample costs
    nothing.
    """
    size = np.asarray(sizes, dtype=np.int64)[source]
    epoch, inside = np.divmod(positions, size)
    pairs, which = np.unique(source * _EPOCHS + epoch, return_inverse=True)
    table = [_round_keys(seeds[pair // _EPOCHS], pair % _EPOCHS) for pair in pairs.tolist()]
    keys = np.stack(table, axis=1) if table else np.empty((_ROUNDS, 0), dtype=np.uint64)
    which = which.reshape(-1)
    widths = np.asarray([(n - 1).bit_length() for n in sizes], dtype=np.uint64)
    bits, limit = widths[source].reshape(-1), size.reshape(-1).astype(np.uint64)
    result = _feistel(inside.reshape(-1).astype(np.uint64), bits, keys[:, which])
    outside = np.flatnonzero(result >= limit)
    while len(outside):
        again = _feistel(result[outside], bits[outside], keys[:, which[outside]])
        result[outside] = again
        outside = outside[again >= limit[outside]]
    return result.astype(np.int64).reshape(positions.shape)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    text = f"megads epoch order: seed {seed}, epoch {epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(
    values: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Keyed permutations of `[0, 2**bits)`: halves of unequal width take turns being mixed.

    `bits`: of each value; `keys`: `[rounds, values]`.
    """
    one = np.uint64(1)
    high_bits = bits >> one
    low_bits = bits - high_bits
    low_mask, high_mask = (one << low_bits) - one, (one << high_bits) - one
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mix(low ^ key) & high_mask)
        else:
            low = low ^ (_mix(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every output bit avalanches."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def global_batch_positions(consumed: int, global_batch_size: int) -> Ids:
    """Positions of the stream that the step after `consumed` samples reads, in order."""
    return np.arange(consumed, consumed + global_batch_size, dtype=np.int64)


def rank_slice(positions: Ids, micro_batch_size: int, dp_size: int, dp_index: int) -> Ids:
    """This data-parallel rank's share of a global batch, `[num_microbatches, micro_batch_size]`.

    Ranks take consecutive runs of the batch, so row r of rank d is microbatch
    `d * num_microbatches + r` of the step whatever dp is. Raises ValueError when the batch does not
    divide; the configuration check finds that long before.
    """
    if len(positions) % (micro_batch_size * dp_size):
        raise ValueError(
            f"global batch {len(positions)} is not a multiple of micro_batch_size="
            f"{micro_batch_size} x dp={dp_size}"
        )
    share: Ids = positions.reshape(dp_size, -1, micro_batch_size)[dp_index]
    return share


def cut_for_validation(
    num_tokens: int, num_documents: int, document_start: Callable[[int], int], fraction: float
) -> int:
    """Token position where training ends and validation begins.

    The last `fraction` of the tokens is for validation. The cut moves to the nearest document
    boundary when that changes the validation share by at most half; between boundaries further
    apart (few, long documents) it falls inside a document. `document_start(d)` is the first token
    of document d and must be ascending; it is called O(log num_documents) times.
    """
    target = num_tokens - round(num_tokens * fraction)
    share = num_tokens - target
    if share == 0:
        return num_tokens
    after = bisect.bisect_left(range(num_documents), target, key=document_start)
    starts = [document_start(d) for d in (after - 1, after) if 0 <= d < num_documents]
    inside = [start for start in starts if 0 < start < num_tokens]
    nearest = min(inside, key=lambda start: abs(start - target), default=target)
    return nearest if 2 * abs(nearest - target) <= share else target


@dataclass(frozen=True)
class EvaluationBatch:
    """The `count` samples of a source after its first `first`."""

    source: int
    first: int
    count: int


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation reads, fixed before it begins and the same on every rank.

    Each batch is of one source, so that sources have losses of their own. The last of a source is
    filled up with samples of zero weight, as far as the ranks and microbatches need.
    """

    batches: tuple[EvaluationBatch, ...]

    @classmethod
    def make(cls, samples: Sequence[int], global_batch_size: int) -> EvaluationPlan:
        """That many samples of each source, in batches of at most `global_batch_size`."""
        return cls(
            tuple(
                EvaluationBatch(source, first, min(global_batch_size, count - first))
                for source, count in enumerate(samples)
                for first in range(0, count, global_batch_size)
            )
        )

    @property
    def samples(self) -> int:
        """Samples that count towards the loss."""
        return sum(batch.count for batch in self.batches)

    @property
    def num_batches(self) -> int:
        return len(self.batches)
