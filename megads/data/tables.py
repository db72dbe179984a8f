"""Texts out of tables: Parquet files, and whatever the `datasets` library opens.

`hf:NAME[:CONFIG][@SPLIT]` (split `train` when not given) is a data set of the hub, read as a stream
where there is network; or, with a folder as NAME, one that `save_to_disk` wrote, or data files that
`load_dataset` finds in it. Of a data set of the hub only the name is known beforehand, so a change
of it goes unnoticed when a run that was interrupted continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.config.streams import HUB, HubName
from megads.data.chunks import CHUNK_BYTES, Chunk, Input, Rows
from megads.data.tokenizer import file_identity
from megads.errors import DataError
from megads.extras import load_extra

_BATCH_ROWS = 256


def open_table(spec: str, key: str) -> Input:
    """A `.parquet` file, a folder written by `save_to_disk`, or `hf:...`; `key` names the column.

    Raises DataError when it is not there or has no such column of strings.
    """
    if not spec.startswith(HUB) and not Path(spec).is_dir():
        return ParquetInput(Path(spec), key)
    return _open_dataset(spec, key)


class ParquetInput:
    """The text column of a Parquet file, read a batch of rows at a time."""

    def __init__(self, path: Path, key: str) -> None:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        self.path, self.key = path, key
        self.identity = file_identity(path)
        self.size: int | None = path.stat().st_size
        with self._open() as file:
            self._check(file.schema_arrow)

    def _open(self) -> Any:
        pyarrow = load_extra("pyarrow", self.path)
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=CHUNK_BYTES)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: damaged or not a Parquet file ({error})") from error

    def _check(self, schema: Any) -> None:
        from pyarrow import types

        if self.key not in schema.names:
            raise DataError(f"{self.path}: no column {self.key!r}; there are {schema.names}")
        kind = schema.field(self.key).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        if not any(
            test(value) for test in (types.is_string, types.is_large_string, types.is_string_view)
        ):
            raise DataError(f"{self.path}: column {self.key!r} must hold strings, found {kind}")

    def chunks(self) -> Iterator[Chunk]:
        with self._open() as file:
            table = _Table(str(self.path), self.key, self.size, file.metadata.num_rows)
            yield from table.chunks(self._batches(file))

    def _batches(self, file: Any) -> Iterator[list[Any]]:
        import pyarrow

        try:
            for batch in file.iter_batches(
                batch_size=_BATCH_ROWS, columns=[self.key], use_threads=False
            ):
                yield batch.column(0).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}: damaged Parquet file ({error})") from error


class DatasetInput:
    """A data set of the `datasets` library, in memory-mapped files or as a stream."""

    def __init__(self, name: str, key: str, dataset: Any, identity: str, size: int | None) -> None:
        columns = dataset.column_names
        if columns is not None and key not in columns:
            raise DataError(f"{name}: no column {key!r}; there are {columns}")
        self.name, self.key, self._dataset = name, key, dataset
        self.identity, self.size = identity, size

    def chunks(self) -> Iterator[Chunk]:
        rows = None if self.size is None else len(self._dataset)
        yield from _Table(self.name, self.key, self.size, rows).chunks(self._batches())

    def _batches(self) -> Iterator[list[Any]]:
        batches = iter(self._dataset.iter(batch_size=_BATCH_ROWS))
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # of the loader of whatever format, or of the network
                raise DataError(f"{self.name}: cannot be read ({error})") from error
            if batch is None:
                return
            if self.key not in batch:
                raise DataError(f"{self.name}: no column {self.key!r}; there are {sorted(batch)}")
            yield batch[self.key]


def _open_dataset(spec: str, key: str) -> DatasetInput:
    name = HubName.parse(spec) if spec.startswith(HUB) else HubName(spec, None, "train")
    folder = Path(name.name)
    saved = any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
    if not saved and not spec.startswith(HUB):
        raise DataError(
            f"{spec}: a folder that datasets did not save; name its files, or {HUB}{spec} to have "
            f"datasets look for some"
        )
    datasets = load_extra("datasets", spec)
    files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else ()
    identity = "\n".join([spec, *map(file_identity, files)])
    try:
        if not saved:
            stream = datasets.load_dataset(name.name, name.config, split=name.split, streaming=True)
            return DatasetInput(spec, key, stream, identity, None)
        found: Any = datasets.load_from_disk(folder)
    except Exception as error:  # of the loader of whatever format, or of the network
        raise DataError(f"{spec}: cannot be opened ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        if name.split not in found:
            raise DataError(f"{spec}: no split {name.split!r}; there are {sorted(found)}")
        found = found[name.split]
    if key in found.column_names:
        found = found.select_columns([key])
    return DatasetInput(spec, key, found, identity, found.data.nbytes)


@dataclass(frozen=True)
class _Table:
    """Where rows come from; `size` bytes in `rows` rows, None when a stream does not know."""

    name: str
    key: str
    size: int | None
    rows: int | None

    def chunks(self, batches: Iterable[list[Any]]) -> Iterator[Chunk]:
        texts: list[str] = []
        first = size = 0
        for batch in batches:
            for text in batch:
                if not isinstance(text, str):
                    raise DataError(
                        f"{self.name}, row {first + len(texts)}: {self.key!r} must be a string, "
                        f"found {type(text).__name__}"
                    )
                texts.append(text)
                size += len(text) if text.isascii() else len(text.encode())
                if size >= CHUNK_BYTES:
                    yield self._chunk(first, texts, size)
                    first, size, texts = first + len(texts), 0, []
        if texts:
            yield self._chunk(first, texts, size)

    def _chunk(self, first: int, texts: list[str], size: int) -> Rows:
        packed = 0
        if self.size and self.rows:
            last = first + len(texts)
            packed = self.size * last // self.rows - self.size * first // self.rows
        return Rows(self.name, first, texts, size, packed)
