"""Which sources a run's samples come from, as data that is saved with the run.

Two counts are kept apart. *Consumed* counts the samples that were trained on. A *position* counts
places of the run's stream, of which some are skipped and then consumed by nobody. A plan is a list
of segments: from position `start` on, sources take turns by their `parts` of the whole, each going
on after the samples that it had given before. What was planned once stays as it was: new weights
or sources on a resume begin a new segment at the next unread position, and only what had not been
read is planned anew. `megads.data.order` walks a plan. Layout, micro batch and batch size have no
part in it. Pure: no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megads.data.blend import integer_weights
from megads.errors import DataError

SIZE_PERIOD = 2**16
"""Without weights, sources take turns by their sizes to one part in this many."""


@dataclass(frozen=True)
class PlannedSource:
    """One source of samples, known by what it holds and not by where it lies.

    `identity` stands for the content, the range of tokens and the sample length; the same with
    another `seed` is another order and so another source. `key` is the seed of its order.
    """

    name: str
    identity: str
    samples: int
    seed: int
    key: int

    @classmethod
    def make(cls, name: str, identity: str, samples: int, seed: int) -> PlannedSource:
        """A source whose order follows from the run's seed and its content alone."""
        text = f"megads source order: seed {seed}, source {identity}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")
        return cls(name, identity, samples, seed, key)


@dataclass(frozen=True)
class Mixture:
    """What the configuration says about the sources it names, one entry for each.

    `weights` None: by size. `limits`: the most samples a source may give in the whole run, None
    for any number. `skips`: ranges `[first, after)` of positions that nobody reads.
    """

    weights: tuple[float, ...] | None
    limits: tuple[int | None, ...]
    skips: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Segment:
    """From position `start` on: parts of the whole, samples given before, most samples given.

    All three have one entry for each of the plan's sources; parts 0 gives nothing.
    """

    start: int
    parts: tuple[int, ...]
    given: tuple[int, ...]
    limits: tuple[int | None, ...]


@dataclass(frozen=True)
class DataPlan:
    """Sources, segments in order of their start, and skipped ranges, ascending and apart."""

    sources: tuple[PlannedSource, ...]
    segments: tuple[Segment, ...]
    skips: tuple[tuple[int, int], ...] = ()

    @classmethod
    def begin(cls, sources: Sequence[PlannedSource], mixture: Mixture) -> DataPlan:
        """The plan of a run that has read nothing yet.

        Raises DataError for bad weights and for a source with a weight but without a sample.
        """
        found = distinct(sources)
        segment = Segment(0, _parts(found, mixture), (0,) * len(found), mixture.limits)
        return cls(found, (segment,), merged(mixture.skips))

    def position(self, consumed: int) -> int:
        """Position of the sample that is read next after `consumed` samples."""
        return position_after(self.skips, consumed)

    def continued(
        self,
        sources: Sequence[PlannedSource],
        mixture: Mixture,
        *,
        consumed: int,
        given: Sequence[int],
    ) -> DataPlan:
        """This plan up to what was consumed, then these sources in this mixture.

        `given`: samples each source of this plan had given at `position(consumed)`. Skips that
        begin later are those of the mixture. Equal to this plan where nothing has changed.
        Raises DataError as `begin`.
        """
        position = self.position(consumed)
        if position == 0:
            return DataPlan.begin(sources, mixture)
        skips = [(first, min(after, position)) for first, after in self.skips if first < position]
        skips += [(max(first, position), after) for first, after in mixture.skips]
        wanted = distinct(sources)
        known = {_same(source): number for number, source in enumerate(self.sources)}
        new = [source for source in wanted if _same(source) not in known]
        everything = (*self.sources, *new)
        places = {_same(source): number for number, source in enumerate(everything)}
        parts, limits = [0] * len(everything), _unlimited(len(everything))
        found = zip(wanted, _parts(wanted, mixture), mixture.limits, strict=True)
        for source, part, limit in found:
            place = places[_same(source)]
            parts[place], limits[place] = part, limit
        before = [s for s in self.segments if s.start < position]
        counts = (*given, *(0 for _ in new))
        segment = Segment(position, tuple(parts), counts, tuple(limits))
        padded = [_widened(s, len(everything)) for s in before]
        last = padded[-1]
        if (last.parts, last.limits) != (segment.parts, segment.limits):
            padded.append(segment)
        return DataPlan(everything, tuple(padded), merged(skips))

    def supply(self) -> int | None:
        """Position at which the last segment's limits leave nothing more; None: never."""
        last = self.segments[-1]
        left = 0
        for part, given, limit in zip(last.parts, last.given, last.limits, strict=True):
            if part and limit is None:
                return None
            left += max(0, (limit or 0) - given) if part else 0
        return last.start + left

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataPlan:
        """The plan that `to_dict` gave. Raises DataError for anything else."""
        try:
            sources = tuple(PlannedSource(**source) for source in values["sources"])
            segments = tuple(
                Segment(s["start"], tuple(s["parts"]), tuple(s["given"]), tuple(s["limits"]))
                for s in values["segments"]
            )
            skips = tuple((int(first), int(after)) for first, after in values["skips"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a data plan: {type(error).__name__} {error}") from None
        plan = cls(sources, segments, skips)
        plan._check()
        return plan

    def _check(self) -> None:
        sizes = {len(self.sources)}
        for segment in self.segments:
            sizes |= {len(segment.parts), len(segment.given), len(segment.limits)}
        starts = [segment.start for segment in self.segments]
        if len(sizes) != 1 or not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise DataError(
                f"not a data plan: {len(self.sources)} sources, segments that start at {starts}"
            )


def distinct(sources: Sequence[PlannedSource]) -> tuple[PlannedSource, ...]:
    """The sources, with one that is named twice made into two of different order."""
    seen: dict[str, int] = {}
    result = []
    for source in sources:
        number = seen[source.identity] = seen.get(source.identity, 0) + 1
        if number > 1:
            again = f"{source.identity}-{number}"
            source = PlannedSource.make(source.name, again, source.samples, source.seed)
        result.append(source)
    return tuple(result)


def position_after(skips: Sequence[tuple[int, int]], consumed: int) -> int:
    """Position of the sample that is read after `consumed` samples; skips as from `merged`."""
    position = consumed
    for first, after in skips:
        if first > position:
            break
        position += after - first
    return position


def merged(skips: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges `[first, after)` in ascending order, joined where they touch, empty ones dropped."""
    result: list[tuple[int, int]] = []
    for first, after in sorted(skips):
        if after <= first:
            continue
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], after))
        else:
            result.append((first, after))
    return tuple(result)


def _same(source: PlannedSource) -> tuple[str, int]:
    return source.identity, source.seed


def _widened(segment: Segment, sources: int) -> Segment:
    more = sources - len(segment.parts)
    return Segment(
        segment.start,
        segment.parts + (0,) * more,
        segment.given + (0,) * more,
        segment.limits + tuple(_unlimited(more)),
    )


def _unlimited(sources: int) -> list[int | None]:
    return [None] * sources


def _parts(sources: Sequence[PlannedSource], mixture: Mixture) -> tuple[int, ...]:
    sizes = [source.samples for source in sources]
    if not any(sizes):
        raise DataError("the sources hold no sample: each is shorter than seq_length + 1 tokens")
    if mixture.weights is None:
        return integer_weights(sizes, most=SIZE_PERIOD)
    if len(mixture.weights) != len(sizes):
        raise DataError(
            f"data.weights holds {len(mixture.weights)} weights for {len(sizes)} sources"
        )
    parts = integer_weights(mixture.weights)
    for source, part in zip(sources, parts, strict=True):
        if part and source.samples < 1:
            raise DataError(
                f"{source.name} has a weight but holds no sample: it is shorter than "
                f"seq_length + 1 tokens"
            )
    return parts
