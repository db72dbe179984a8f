from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megads.config.schema import Config
from megads.config.streams import num_lanes
from megads.config.validate import validate
from megads.data import streaming_source
from megads.data.prepare import prepare_data
from megads.data.streaming import StreamLoader, open_stream_loader
from megads.data.streaming_lane import LaneReader, Place
from megads.data.streaming_source import open_lane, open_stream
from megads.errors import CheckpointError, DataError
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Axis
from tests.distributed import Workers
from tests.training import (
    assert_same_curve,
    column,
    run_training,
    tiny_config,
    world_size,
)

pytest.importorskip("datasets", reason="needs the packages of megads[data]")

EOD = 256
ALONE = Axis("dp", 1, 0, (0,), None)
RAGGED = [
    "",
    "abcdefghijklmnopqrstu",
    "é",
    "",
    "xyz",
    "0",
    "a longer one, of some 30 letters",
    "éa",
]


@functools.cache
def _base() -> Config:
    return tiny_config(Path("run"), "x", "gpt", "model.vocab_size=263", "data.source=streaming")


def settings(
    paths: Sequence[Path | str], train: Mapping[str, Any] | None = None, **data: Any
) -> Config:
    """A streaming run's configuration, without composing it anew."""
    base = _base()
    data["paths"] = tuple(map(str, paths))
    return base.model_copy(
        update={
            "data": base.data.model_copy(update=data),
            "train": base.train.model_copy(update=train or {}),
        }
    )


def composed(paths: Sequence[Path], run_dir: Path, *overrides: str) -> Config:
    files = ",".join(map(str, paths))
    words = ("model.vocab_size=263", "data.source=streaming", *overrides)
    return tiny_config(run_dir, files, "gpt", *words)


def jsonl(folder: Path, files: Sequence[Sequence[str]], key: str = "text") -> list[Path]:
    """One file for each list of texts."""
    paths = [folder / f"part-{number}.jsonl" for number in range(len(files))]
    for path, texts in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps({"id": 7, key: text}) + "\n" for text in texts))
    return paths


def parquet(folder: Path, files: Sequence[Sequence[str]]) -> list[Path]:
    """Row groups of three records."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files_of

    paths = [folder / f"part-{number}.parquet" for number in range(len(files))]
    for path, texts in zip(paths, files, strict=True):
        columns = {"id": list(range(len(texts))), "text": list(texts)}
        files_of.write_table(pyarrow.table(columns), path, row_group_size=3)
    return paths


def rows(batches: Sequence[MicroBatch]) -> list[list[int]]:
    """Each sample as its seq_length + 1 tokens."""
    result: list[list[int]] = []
    for batch in batches:
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        result += torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1).tolist()
    return result


def split_evenly(texts: list[str], shards: int) -> list[list[str]]:
    return [texts[number::shards] for number in range(shards)]


def lane_texts(files: Sequence[Sequence[str]], lane: int, lanes: int) -> list[str]:
    """By hand: whole files where they divide evenly among the lanes, else every nth record."""
    if len(files) % lanes == 0:
        return [text for file in files[lane::lanes] for text in file]
    return [text for file in files for text in file][lane::lanes]


def cut(texts: Sequence[str], seq_length: int) -> list[list[int]]:
    """By hand: UTF-8 bytes, an end after each text that has any, runs that overlap by one."""
    stream = [token for text in texts if text for token in [*text.encode(), EOD]]
    count = (len(stream) - 1) // seq_length
    return [stream[k * seq_length : (k + 1) * seq_length + 1] for k in range(count)]


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_each_row_once_per_epoch_over_the_data_parallel_ranks(shards: int, tmp_path: Path) -> None:
    """12 rows, each as long as a sample; 4 lanes, so some have fewer shards than lanes."""
    texts = [f"row {number:02}" for number in range(12)]
    paths = jsonl(tmp_path, split_evenly(texts, shards))
    config = settings(paths, {"seq_length": 7}, lanes=4)

    def epoch(dp: int) -> list[list[int]]:
        read = []
        for index in range(dp):
            peers = [open_stream_loader(config) for _ in range(2)]
            one, other = (rows(peer.batches(0, 12, 1, dp, index)) for peer in peers)
            assert one == other  # tensor- and pipeline-parallel peers
            read += one
            for peer in peers:
                peer.close()
        return read

    whole = epoch(1)
    assert Counter(bytes(row[:6]).decode() for row in whole) == Counter(texts)
    assert epoch(2) == whole
    assert epoch(4) == whole


def test_lanes_that_read_the_same_part_are_seen(tmp_path: Path) -> None:
    """Negative control: what sharding by the wrong rank does to the test above."""
    paths = jsonl(tmp_path, [[f"row {number:02}" for number in range(12)]])
    config = settings(paths, {"seq_length": 7}, lanes=4)
    stream = open_stream(config)
    data = loader_of(lambda lane: open_lane(stream, lane % 2, 2), lanes=4, seq_length=7)
    read = Counter(bytes(row[:6]) for row in rows(data.batches(0, 12, 1, 1, 0)))
    data.close()
    assert max(read.values()) == 2


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_documents_are_packed_as_by_hand(
    write: Callable[..., list[Path]], shards: int, tmp_path: Path
) -> None:
    """Empty, long and multi-byte texts; two lanes; a first epoch of each, then the next begins."""
    files = split_evenly([*RAGGED, *(f"{t}?" for t in RAGGED), "end"], shards)
    config = settings(write(tmp_path, files), {"seq_length": 5}, lanes=2)
    data = open_stream_loader(config)
    want = [cut(lane_texts(files, lane, 2), 5) for lane in range(2)]
    steps = min(map(len, want)) // 2
    assert steps >= 4
    for step in range(steps):
        read = rows(data.batches(4 * step, 4, 2, 1, 0))
        assert read == [row for lane in want for row in lane[2 * step : 2 * step + 2]]
    data.close()


def test_epochs_go_on_without_a_gap(tmp_path: Path) -> None:
    """One lane: the order of every epoch is that of the files and of their documents."""
    files = jsonl(tmp_path, [RAGGED[:2], RAGGED[2:4], RAGGED[4:]])
    config = settings(files, {"seq_length": 5}, lanes=1)
    data = open_stream_loader(config)
    want = cut(RAGGED * 4, 5)
    assert [rows(data.batches(i, 1, 1, 1, 0))[0] for i in range(len(want))] == want
    data.close()


def test_texts_are_those_that_preprocessing_reads(tmp_path: Path) -> None:
    """Pages of a text, a compressed one and JSON lines of another key."""
    (tmp_path / "a.txt").write_text("one page\fanother\r\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a third page, compressed"))
    paths = [tmp_path / "a.txt", tmp_path / "b.txt.gz", *jsonl(tmp_path, [["fourth"]], "text")]
    config = settings(paths, {"seq_length": 3}, lanes=1)
    want = cut(["one page", "another\r\n", "a third page, compressed", "fourth"], 3)
    data = open_stream_loader(config)
    assert [rows(data.batches(i, 1, 1, 1, 0))[0] for i in range(len(want))] == want
    data.close()


def test_document_boundaries_are_masked(tmp_path: Path) -> None:
    """Against the document of each token, told apart by counting."""
    config = settings(jsonl(tmp_path, [RAGGED]), {"seq_length": 5}, lanes=1, document_mask=True)
    number = [i for i, text in enumerate(t for t in RAGGED if t) for _ in [*text.encode(), EOD]]
    data = open_stream_loader(config)
    for k in range((len(number) - 1) // 5):
        of = number[5 * k : 5 * k + 6]
        [batch] = data.batches(k, 1, 1, 1, 0)
        assert batch.document_starts is not None
        assert batch.loss_mask is not None
        assert batch.document_starts[0].tolist() == [of.index(document) for document in of[:-1]]
        assert batch.loss_mask[0].tolist() == [float(a == b) for a, b in pairwise(of)]
    data.close()


def test_ranks_do_not_run_out_at_different_times(tmp_path: Path) -> None:
    """Two shards of 7 and 4 documents on two ranks, some four epochs long."""
    paths = jsonl(tmp_path, [["seven"] * 7, ["four"] * 4])
    config = settings(paths, {"seq_length": 8}, lanes=2)
    for index in range(2):
        data = open_stream_loader(config)
        assert [len(data.batches(8 * k, 8, 2, 2, index)) for k in range(6)] == [2] * 6
        data.close()


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("buffer", [0, 3])
def test_going_on_is_as_if_never_stopped(
    write: Callable[..., list[Path]], buffer: int, tmp_path: Path
) -> None:
    """From after every step, over two epochs, on another number of ranks."""
    paths = write(tmp_path, split_evenly([*RAGGED, *(f"{t}?" for t in RAGGED)], 3))
    config = settings(paths, {"seq_length": 9}, lanes=4, shuffle_buffer=buffer)
    whole, states = open_stream_loader(config), []
    read = []
    for step in range(14):
        read.append(rows(whole.batches(8 * step, 8, 2, 1, 0)))
        states.append(json.dumps(whole.state_dict(ALONE)))
    whole.close()
    assert any(place["epoch"] > 1 for place in json.loads(states[-1])["places"])
    assert any(place["skip"] for s in states for place in json.loads(s)["places"]) == (buffer > 0)
    for step in range(1, 13):
        dp = 1 << step % 3
        again: list[list[list[int]]] = [[], []]
        for index in range(dp):
            data = open_stream_loader(config)
            data.load_state_dict(json.loads(states[step - 1]), 8 * step)
            for k in range(2):
                again[k] += rows(data.batches(8 * (step + k), 8, 2, dp, index))
            data.close()
        assert again == read[step : step + 2]
    broken = json.loads(states[4])
    for place in broken["places"]:
        place["offset"] = 0
    data = open_stream_loader(config)
    data.load_state_dict(broken, 40)
    assert rows(data.batches(40, 8, 2, 1, 0)) != read[5]  # negative control
    data.close()


def test_what_is_left_out_is_read_by_nobody_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """Ranges that touch, from the first sample on, and wherever a run goes on around them."""
    paths = jsonl(tmp_path, split_evenly([*RAGGED, *(f"{t}?" for t in RAGGED)], 3))
    config = settings(paths, {"seq_length": 9}, lanes=4, shuffle_buffer=3)
    whole = open_stream_loader(config)
    read = [rows(whole.batches(8 * step, 8, 2, 1, 0)) for step in range(14)]
    whole.close()
    for ranges, out in (([(24, 32)], [3]), ([(0, 16), (48, 56), (56, 64)], [0, 1, 6, 7])):
        want = [batch for number, batch in enumerate(read) if number not in out]
        data, states = open_stream_loader(config), []
        data.leave_out(ranges)
        for step in range(10):
            states.append(json.dumps(data.state_dict(ALONE)))
            assert rows(data.batches(8 * step, 8, 2, 1, 0)) == want[step]
        assert data.position(8 * 9) == 8 * (9 + len(out))
        for step in range(9):  # in the loader that is under way, and in new ones
            data.load_state_dict(json.loads(states[step]), 8 * step)
            assert rows(data.batches(8 * step, 8, 2, 1, 0)) == want[step]
            halves: list[list[int]] = []
            for index in range(2):
                other = open_stream_loader(config)
                other.load_state_dict(json.loads(states[step]), 8 * step)
                other.leave_out(ranges)
                halves += rows(other.batches(8 * step, 8, 2, 2, index))
                other.close()
            assert halves == want[step]
        data.close()


def test_shuffling_keeps_every_document_and_changes_with_seed_and_epoch(tmp_path: Path) -> None:
    texts = [f"row {number:02}" for number in range(12)]
    paths = jsonl(tmp_path, [texts])
    orders = []
    for seed in (1, 2):
        config = settings(paths, {"seq_length": 7, "seed": seed}, lanes=1, shuffle_buffer=5)
        data = open_stream_loader(config)
        for epoch in range(2):
            read = rows(data.batches(12 * epoch, 12, 1, 1, 0))
            orders.append([bytes(row[:6]).decode() for row in read])
        data.close()
    assert len(set(map(tuple, [texts, *orders]))) == 5
    for order in orders:
        for block in range(0, 12, 5):
            assert sorted(order[block : block + 5]) == texts[block : block + 5]


def loader_of(
    open: Callable[[int], Any], *, lanes: int = 1, seq_length: int = 3, name: str = "made up"
) -> StreamLoader:
    """A loader over records made up in the test, whose text is bytes."""
    return StreamLoader(
        LaneReader(
            open=open,
            tokens_of=lambda record: np.frombuffer(record["text"].encode(), "u1").astype(np.int64),
            seq_length=seq_length,
            lanes=lanes,
            shuffle_buffer=0,
            seed=0,
            name=name,
        )
    )


class Failing:
    """Records that end with an error, as a connection does."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"text": "abcdefgh"}
        raise OSError("connection reset")

    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_a_stream_that_breaks_ends_the_step_that_needs_it_every_time() -> None:
    data = loader_of(lambda lane: Failing())
    assert rows(data.batches(0, 1, 1, 1, 0)) == [[*b"abcd"]]
    assert rows(data.batches(1, 1, 1, 1, 0)) == [[*b"defg"]]
    for _ in range(2):
        with pytest.raises(DataError, match=r"lane 0 of 1 .*after document 1 of epoch 0.*reset"):
            data.batches(2, 1, 1, 1, 0)
    data.close()


def test_a_record_without_its_text_is_named(tmp_path: Path) -> None:
    good, bad = jsonl(tmp_path, [["text"] * 3, ["text"]])
    bad.write_text('{"text": "fine"}\n{"body": "x", "id": 3}\n')
    data = open_stream_loader(settings([good, bad], {"seq_length": 4}, lanes=1))
    with pytest.raises(DataError, match=r"part-1\.jsonl, line 2: no key 'text'.*'body', 'id'"):
        for step in range(8):
            data.batches(step, 1, 1, 1, 0)
    data.close()
    for path in (bad, *parquet(tmp_path, [["a"]])):
        with pytest.raises(DataError, match=r"no (key|column) 'words'.*text"):
            prepare_data(settings([path], text_key="words"))


def test_fewer_documents_than_lanes_are_refused_before_the_start(tmp_path: Path) -> None:
    for write in (jsonl, parquet):
        with pytest.raises(DataError, match=r"3 documents for data\.lanes=4.*data\.lanes=3"):
            prepare_data(settings(write(tmp_path, [["a", "b", "c"]]), lanes=4))
    data = open_stream_loader(settings(jsonl(tmp_path, [["a", ""]]), lanes=2))
    with pytest.raises(DataError, match=r"lane 1 of 2 has no text in epoch 0.*lanes=2"):
        data.batches(0, 2, 1, 1, 0)
    data.close()


def test_a_hub_that_cannot_be_reached_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    config = settings(["hf:nobody/nothing:part@train"])
    assert not validate(config)
    with pytest.raises(DataError, match=r"hf:nobody/nothing:part@train cannot.*network here"):
        streaming_source.check_stream(config)


def test_a_folder_of_files_is_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """The library's own JSON reader and folder layout, on what the hub would send."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a first"}\n{"text": "a second"}\n')
    (folder / "test.jsonl").write_text('{"text": "held out"}\n{"text": "test"}\n')
    for split, texts in (("", ["a first", "a second"]), ("@test", ["held out", "test"])):
        config = settings([f"hf:{folder}{split}"], {"seq_length": 3}, lanes=2)
        prepare_data(config)
        data = open_stream_loader(config)
        want = [cut(lane_texts([texts], lane, 2), 3)[0] for lane in range(2)]
        assert rows(data.batches(0, 2, 1, 1, 0)) == want
        data.close()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.lanes=3", ["data.lanes=3", "train.global_batch_size=8", "1, 2, 4, 8"]),
        ("data.lanes=2 parallel.dp=4", ["data.lanes=2", "size 4", "4, 8"]),
        ("parallel.dp=3 train.global_batch_size=12", ["data.lanes=4", "size 3", "3, 6, 12"]),
        (
            "data.lanes=8 train.batch_rampup=[4,4,20]",
            ["rampup start=4", "rampup increment=4", "1, 2, 4"],
        ),
        ("data.weights=[1.0]", ["data.weights", "one stream"]),
        ("data.skip=[[0,4]]", ["data.skip=((0, 4),)", "data.source=files"]),
        ("data.epochs=2", ["data.epochs=(2.0,)", "data.source=files"]),
        ("eval.every=5", ["eval.every=5", "data.valid_paths"]),
        ("data.source=files data.lanes=4", ["data.lanes=4", "data.source=streaming"]),
        ("data.source=files data.shuffle_buffer=9", ["shuffle_buffer=9", "streaming"]),
        ("data.paths=[/no/such.jsonl]", ["/no/such.jsonl", "no such file"]),
        ("data.paths=[corpus]", ["corpus cannot be streamed", "data.source=files", ".parquet"]),
        ("data.paths=['hf:']", ["hf:NAME"]),
        ("data.paths=['hf:a','hf:b']", ["hf:a can only be streamed alone", "2 paths"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    overrides: str, words: list[str], tmp_path: Path
) -> None:
    paths = jsonl(tmp_path, [["a"]])
    config = composed(paths, tmp_path, "train.micro_batch_size=1", *overrides.split())
    problems = validate(config, world_size(config))
    assert problems
    for word in words:
        assert any(word in problem for problem in problems), problems


def test_default_lanes_are_the_batch_s_and_not_the_layout_s() -> None:
    for batch, lanes in ((8, 8), (12, 4), (5, 1), (512, 8)):
        assert num_lanes(settings([], {"global_batch_size": batch})) == lanes
    ramp = {"global_batch_size": 32, "batch_rampup": (16, 4, 100)}
    assert num_lanes(settings([], ramp)) == 4


def test_a_place_of_another_stream_is_refused(tmp_path: Path) -> None:
    paths = jsonl(tmp_path, [["some text", "more text"]])
    config = settings(paths, {"seq_length": 4}, lanes=2)
    data = open_stream_loader(config)
    data.batches(0, 4, 2, 1, 0)
    state = data.state_dict(ALONE)
    data.close()
    other = open_stream_loader(settings(paths, {"seq_length": 4}, lanes=4))
    with pytest.raises(CheckpointError, match=r"data\.lanes has changed from 2 to 4"):
        other.load_state_dict(state, 4)
    for missing, consumed in ((None, 4), (state, 8)):
        with pytest.raises(CheckpointError, match=f"after {consumed} samples"):
            open_stream_loader(config).load_state_dict(missing, consumed)
    fresh = open_stream_loader(config)
    fresh.load_state_dict(None, 0)
    with pytest.raises(ValueError, match="at sample 0, not at 4"):
        fresh.batches(4, 4, 2, 1, 0)
    paths[0].write_text('{"text": "a"}\n{"text": "b"}\n')
    changed = open_stream_loader(config)
    state["places"][0]["offset"] = 9
    changed.load_state_dict(state, 4)
    with pytest.raises(CheckpointError, match=r"lane 0 was at token 9.*not what it was"):
        changed.batches(4, 4, 2, 1, 0)
    assert Place.from_dict(Place(3).to_dict()) == Place(3)


def spy(rank: int, folder: str) -> Callable[[], None]:
    """Write down the samples of each step that a rank hands to its model."""
    original = StreamLoader.batches

    def batches(self: StreamLoader, consumed: int, *sizes: int) -> list[MicroBatch]:
        result = original(self, consumed, *sizes)
        Path(folder, f"{consumed:03}-{sizes[-1]}-{rank}").write_text(json.dumps(rows(result)))
        return result

    StreamLoader.batches = batches  # type: ignore[method-assign]
    return lambda: setattr(StreamLoader, "batches", original)


def samples_seen(folder: Path) -> dict[int, list[list[int]]]:
    """The samples of each step, over data-parallel ranks; their peers must have read the same."""
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for path in sorted(folder.iterdir()):
        consumed, index, _ = map(int, path.name.split("-"))
        read = json.loads(path.read_text())
        assert seen.setdefault((consumed, index), read) == read
    steps: dict[int, list[list[int]]] = {}
    for (consumed, _), read in sorted(seen.items()):
        steps.setdefault(consumed, []).extend(read)
    return steps


def test_runs_of_any_layout_read_and_learn_the_same(workers: Workers, tmp_path: Path) -> None:
    """Also when a run is stopped and goes on with another number of data-parallel ranks."""
    paths = jsonl(
        tmp_path, split_evenly([f"{n} {t} and {n * n}" for n in range(9) for t in RAGGED], 3)
    )
    (tmp_path / "valid.jsonl").write_text('{"text": "held out, and long enough for a sample"}\n')
    common = ["train.micro_batch_size=2", "data.lanes=4", "train.steps=6", "optim.total=6"]
    common += [
        "eval.every=6",
        f"data.valid_paths=[{tmp_path}/valid.jsonl]",
        "data.shuffle_buffer=4",
    ]

    def run(name: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[int, list[list[int]]]]:
        folder = tmp_path / f"{name}-samples"
        folder.mkdir(exist_ok=True)
        config = composed(paths, tmp_path / name, *common, *overrides)
        assert not validate(config, world_size(config))
        return run_training(workers, config, spy, str(folder)), samples_seen(folder)

    whole, seen = run("one")
    assert list(seen) == [0, 8, 16, 24, 32, 40]
    assert len(column(whole, "val_loss")) == 1
    for name, layout in (
        ("dp2", ["parallel.dp=2"]),
        ("dp2tp2", ["parallel.dp=2", "parallel.tp=2"]),
    ):
        lines, read = run(name, *layout)
        assert_same_curve(lines, whole)
        assert read == seen
    stop = ["train.steps=3", "checkpoint.save_last=true"]
    run("moved", "parallel.dp=2", *stop)
    lines, read = run("moved")
    assert read == seen
    assert_same_curve(lines, whole)
    assert (
        run("other", "data.shuffle_buffer=0", "train.steps=1")[1][0] != seen[0]
    )  # negative control
