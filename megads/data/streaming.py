"""Microbatches of a step from a stream that is read and tokenized while training.

The rows of a global batch are dealt to the lanes in turn: of G rows and N lanes, row r is of lane
`r // (G / N)`. A data-parallel rank reads the lanes of its own rows; its tensor- and
pipeline-parallel peers read the same ones. So the samples of a step are a function of the stream,
the number of lanes and the steps before, never of the layout.

Unlike a token file a stream has no random access. The loader remembers where each lane is, as of
the samples that were handed out, not of those read ahead, and that is saved with a checkpoint.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from megads.config.schema import Config
from megads.config.streams import num_lanes
from megads.data.microbatches import Rows, cut_rows, placed
from megads.data.plan import merged, position_after
from megads.data.streaming_lane import LaneReader, Place, Sample, Tokens
from megads.data.streaming_source import check_record, open_lane, open_stream
from megads.data.tokenizer import load_tokenizer, require_eod
from megads.errors import CheckpointError
from megads.parallel import collectives
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Axis


class StreamLoader:
    """Batches of a stream, in order. Samples of the next step are read in the background.

    `settings` decide what a place in the stream means; a place saved under others is refused.
    Batches are put on `device`. With `document_mask` they say where documents begin, and the first
    token of one is no label in the loss.
    """

    def __init__(
        self,
        reader: LaneReader,
        *,
        settings: dict[str, Any] | None = None,
        device: torch.device | str = "cpu",
        document_mask: bool = False,
    ) -> None:
        self.reader = reader
        self.lanes = reader.lanes
        self.settings = settings or {}
        self.device = torch.device(device)
        self.document_mask = document_mask
        self._consumed = 0
        self._skips: tuple[tuple[int, int], ...] = ()
        self._places = [Place()] * self.lanes
        self._streams: dict[int, Iterator[Sample]] = {}
        self._ready: dict[int, deque[Sample]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="megads-stream")
        self._ahead: Future[None] | None = None

    def batches(
        self,
        consumed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_size: int,
        dp_index: int,
    ) -> list[MicroBatch]:
        """This data-parallel rank's microbatches of the step that begins after `consumed` samples.

        Steps must come one after the other. `MicroBatch.index` numbers the microbatches of the
        whole global batch. Raises ValueError for another step, or sizes that do not divide, which
        the configuration check finds long before; DataError when the stream cannot be read.
        """
        if consumed != self._consumed:
            raise ValueError(f"the stream is at sample {self._consumed}, not at {consumed}")
        if self.lanes % dp_size or global_batch_size % self.lanes:
            raise ValueError(
                f"{self.lanes} lanes for dp={dp_size} and a global batch of {global_batch_size}"
            )
        mine, each = self._lanes_of(dp_size, dp_index), global_batch_size // self.lanes
        if self._ahead is not None:
            self._ahead.result()  # one that failed stays, and fails again
        self._ahead = self._worker.submit(self._fill, mine, each)
        self._ahead.result()
        samples = []
        for lane in mine:
            for _ in range(each):
                samples.append(self._ready[lane].popleft())
                self._places[lane] = samples[-1].after
        self._consumed += global_batch_size
        self._ahead = self._worker.submit(self._fill, mine, each)
        batches = cut_rows(
            Rows(
                np.stack([sample.tokens for sample in samples]),
                np.stack([sample.starts for sample in samples]) if self.document_mask else None,
            ),
            micro_batch_size,
            first=dp_index * (len(samples) // micro_batch_size),
            pin=self.device.type == "cuda",
        )
        return [placed(batch, self.device) for batch in batches]

    def state_dict(self, dp: Axis) -> dict[str, Any]:
        """Where the next step begins, in all lanes, as plain values. Collective over `dp`."""
        mine = json.dumps([self._places[i].to_dict() for i in self._lanes_of(dp.size, dp.index)])
        gathered = collectives.all_gather_object(mine, dp)
        places = [place for text in gathered for place in json.loads(text)]
        return {"samples": self._consumed, "settings": self.settings, "places": places}

    def load_state_dict(self, state: dict[str, Any] | None, consumed: int) -> None:
        """Go on where `state_dict` was, on any number of data-parallel ranks.

        `consumed` is how many samples the training state counts. Raises CheckpointError when there
        is no state though samples were consumed, or one of another number or other settings.
        """
        leave = (
            "set it back, or take the weights into a new run.dir with checkpoint.load=... "
            "checkpoint.load_what=optimizer"
        )
        if state is None or state.get("samples") != consumed:
            found = "none" if state is None else f"that after {state.get('samples')}"
            if state is None and consumed == 0:
                return
            raise CheckpointError(
                f"data.source=streaming goes on from a place in the stream after {consumed} "
                f"samples, and the checkpoint has {found}; {leave}"
            )
        for name, now in self.settings.items():
            if state["settings"].get(name) != now:
                raise CheckpointError(
                    f"{name} has changed from {state['settings'].get(name)} to {now}, and with it "
                    f"what the place in the stream means; {leave}"
                )
        if len(state["places"]) != self.lanes:
            raise CheckpointError(
                f"the checkpoint has places of {len(state['places'])} lanes, there are {self.lanes}"
            )
        self._forget()
        self._places = [Place.from_dict(values) for values in state["places"]]
        self._consumed = consumed

    def leave_out(self, ranges: Sequence[tuple[int, int]]) -> None:
        """From now on, read no sample at these positions `[first, after)` of the stream.

        Both ends lie between batches. A position counts samples, those that are left out included;
        each lane has every `lanes`th part of them.
        """
        self._forget()
        self._skips = merged(ranges)

    def position(self, consumed: int) -> int:
        """Position of the sample that is read next after `consumed` samples."""
        return position_after(self._skips, consumed)

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead = None
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _lanes_of(self, dp_size: int, dp_index: int) -> range:
        share = self.lanes // dp_size
        return range(dp_index * share, (dp_index + 1) * share)

    def _fill(self, lanes: range, each: int) -> None:
        """Have `each` samples of these lanes ready."""
        for lane in lanes:
            if lane not in self._streams:
                self._streams[lane] = self._samples(lane)
                self._ready[lane] = deque()
            ready = self._ready[lane]
            while len(ready) < each:
                ready.append(next(self._streams[lane]))

    def _samples(self, lane: int) -> Iterator[Sample]:
        """Samples of a lane from its place on, but for those that are left out."""
        begin = self.position(self._consumed - 1) + 1 if self._consumed else 0
        samples = self.reader.samples(lane, self._places[lane])
        for number, sample in enumerate(samples, begin // self.lanes):
            place = number * self.lanes
            if not any(first <= place < after for first, after in self._skips):
                yield sample

    def _forget(self) -> None:
        """Drop what was read ahead."""
        wait([self._ahead] if self._ahead is not None else [])
        self._ahead = None
        self._streams.clear()
        self._ready.clear()


def open_stream_loader(config: Config, *, device: torch.device | str = "cpu") -> StreamLoader:
    """The loader of a run with `data.source=streaming`. Raises DataError."""
    stream, lanes, data = open_stream(config), num_lanes(config), config.data
    reader = LaneReader(
        open=lambda lane: open_lane(stream, lane, lanes),
        tokens_of=document_tokens(config),
        seq_length=config.train.seq_length,
        lanes=lanes,
        shuffle_buffer=data.shuffle_buffer,
        seed=config.train.seed,
        name=f"data.paths: {', '.join(data.paths)}",
    )
    return StreamLoader(
        reader,
        settings=stream_settings(config),
        device=device,
        document_mask=data.document_mask,
    )


def document_tokens(config: Config) -> Callable[[dict[str, Any]], Tokens]:
    """From a record to the ids of its document; an empty text gives none. Raises DataError."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    end = [require_eod(tokenizer)] if config.data.append_eod else []

    def tokens_of(record: dict[str, Any]) -> Tokens:
        ids = tokenizer.encode(check_record(record, config))
        return np.asarray(ids + end if ids else [], dtype=np.int64)

    return tokens_of


def stream_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what a place in a lane means."""
    data, shuffled = config.data, config.data.shuffle_buffer > 1
    return {
        "data.paths": list(data.paths),
        "data.lanes": num_lanes(config),
        "data.text_key": data.text_key,
        "data.shuffle_buffer": data.shuffle_buffer if shuffled else 0,
        **({"train.seed": config.train.seed} if shuffled else {}),
    }
