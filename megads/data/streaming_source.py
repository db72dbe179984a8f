"""The records of a stream, as an iterable data set of the `datasets` library.

Files are read by the readers of `megads-preprocess`, so a stream holds the documents that
tokenizing the files beforehand would give; a file is a shard. A data set of the hub comes through
the library's own loaders. Every record holds its text under `data.text_key`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any, Protocol

from megads.config.schema import Config
from megads.config.streams import HUB, HubName, num_lanes
from megads.data.preprocess import FORM_FEED, read_documents
from megads.errors import DataError
from megads.extras import load_extra, missing_extra

_SETTING = "data.source=streaming"


class Records(Protocol):
    """What is used of `datasets.IterableDataset`: a repeatable stream with a place in it."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_stream(config: Config) -> None:
    """Read the beginning of a stream: is the text where it should be, is there one for each lane?

    Files are looked at without the `datasets` library: the first document of each, and as many as
    there are lanes. A data set of the hub is opened and its first record read. Raises DataError.
    """
    data, lanes = config.data, num_lanes(config)
    if data.paths[0].startswith(HUB):
        check_record(_first_record(config), config)
        return
    if find_spec("datasets") is None:
        raise missing_extra("datasets", _SETTING)
    for path in data.paths:
        next(read_documents(path, data.text_key, FORM_FEED), None)
    found = sum(1 for _ in islice(_file_records(data.paths, data.text_key), lanes))
    if found < lanes:
        raise DataError(
            f"data.paths: {', '.join(data.paths)}: {found} documents for data.lanes={lanes}, each "
            f"of which needs one; set data.lanes={found} or less, or add documents"
            if found
            else f"data.paths: {', '.join(data.paths)}: there are no documents"
        )


def _first_record(config: Config) -> dict[str, Any]:
    stream = open_stream(config)
    try:
        first: dict[str, Any] | None = next(iter(stream), None)
    except Exception as error:
        raise DataError(_cannot_open(config, error)) from error
    if first is None:
        raise DataError(f"{_named(config)}: there are no documents")
    return first


def check_record(record: dict[str, Any], config: Config) -> str:
    """The text of a record. Raises DataError naming the key and what there is instead."""
    key = config.data.text_key
    if key not in record:
        raise DataError(
            f"{_named(config)}: no column data.text_key={key}; the columns are {sorted(record)}"
        )
    text = record[key]
    if not isinstance(text, str):
        raise DataError(
            f"{_named(config)}: data.text_key={key} must hold a string, found {type(text).__name__}"
        )
    return text


def open_stream(config: Config) -> Any:
    """The whole stream as an `IterableDataset`; reads nothing yet, but a hub is asked.

    Raises DataError when the library is missing or the data set cannot be opened.
    """
    datasets, data = load_extra("datasets", _SETTING), config.data
    if not data.paths[0].startswith(HUB):
        arguments = {"files": list(data.paths), "key": data.text_key}
        return datasets.IterableDataset.from_generator(_file_records, gen_kwargs=arguments)
    hub = HubName.parse(data.paths[0])
    try:
        return datasets.load_dataset(hub.name, hub.config, split=hub.split, streaming=True)
    except Exception as error:  # the library lets through whatever its many readers raise
        raise DataError(_cannot_open(config, error)) from error


def open_lane(stream: Any, lane: int, lanes: int) -> Records:
    """One lane's part of the stream: whole shards where they divide evenly, else every nth record.

    Shards are files, or what the hub's data set is made of. The same part for every layout.
    """
    from datasets.distributed import split_dataset_by_node

    part: Records = split_dataset_by_node(stream, rank=lane, world_size=lanes)
    return part


def _file_records(files: Sequence[str], key: str) -> Iterator[dict[str, str]]:
    for path in files:
        for text in read_documents(path, key, FORM_FEED):
            yield {key: text}


def _cannot_open(config: Config, error: Exception) -> str:
    cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    unreachable = isinstance(error, ConnectionError | TimeoutError)
    fix = (
        "is there network here? Without it, copy the files of the data set and name those"
        if unreachable
        else f"expected {HUB}NAME[:CONFIG][@SPLIT] as the hub has it"
    )
    return f"{_named(config)} cannot be opened ({cause}); {fix}"


def _named(config: Config) -> str:
    return f"data.paths: {', '.join(config.data.paths)}"
