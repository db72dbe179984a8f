from __future__ import annotations

import os
import random
import signal
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megads.checkpoint import io
from megads.checkpoint.reader import verify
from megads.checkpoint.store import CheckpointStore
from megads.errors import CheckpointError
from megads.models.families import param_specs
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import ParamSpec, flat_range_boxes
from tests.checkpoint.simulation import META, MODEL, simulate
from tests.distributed import mesh_for

ALONE = Axis("world")
SPECS = param_specs(MODEL)
KINDS = ("param", "exp_avg", "exp_avg_sq")
UNTOUCHED = -1.0


def stamped(spec: ParamSpec, kind: str) -> Tensor:
    """A global tensor in which every element of every parameter and moment is another number."""
    base = 10000 * (SPECS.index(spec) + 1)
    return (torch.arange(spec.numel) + base).view(spec.shape) + 0.25 * KINDS.index(kind)


def local_shard(whole: Tensor, spec: ParamSpec, tp: int, index: int) -> Tensor:
    """What tensor-parallel rank `index` must hold, from the rules and not from `spec`'s methods."""
    if spec.tp_dim is None:
        return whole
    if spec.pad_multiple:
        share = -(-spec.shape[0] // tp)
        rows = -(-share // spec.pad_multiple) * spec.pad_multiple
        out = torch.full((rows, *spec.shape[1:]), UNTOUCHED)
        mine = whole[index * rows : (index + 1) * rows]
        out[: len(mine)] = mine
        return out
    sizes = [part.size for part in spec.parts] or [spec.shape[spec.tp_dim]]
    units = [part.units for part in spec.parts] or sizes
    shards = []
    for part, count in zip(whole.split(sizes, spec.tp_dim), units, strict=True):
        heads = part.chunk(count, spec.tp_dim)
        if count < tp:
            heads = [head for head in heads for _ in range(tp // count)]
        per_rank = len(heads) // tp
        shards += heads[index * per_rank : (index + 1) * per_rank]
    return torch.cat(shards, spec.tp_dim)


class Rank:
    """One (tp, dp) rank under ZeRO: flat shards of every parameter and both moments."""

    def __init__(self, tp: int, dp: int, rank: int, seed: int, *, filled: bool) -> None:
        self.tp, self.index, self.dp_index = tp, rank % tp, rank // tp
        self.shards: list[tuple[str, ParamSpec, int, int, Tensor]] = []
        for spec in SPECS:
            size = torch.Size(spec.local_shape(tp)).numel()
            # Cut points of the flat tensor over dp, equal on all tp ranks; shards may be empty.
            draw = random.Random(f"{seed} {spec.name}")
            cuts = [0, *sorted(draw.randrange(size + 1) for _ in range(dp - 1)), size]
            start, stop = cuts[self.dp_index], cuts[self.dp_index + 1]
            for kind in KINDS:
                data = self.expected(kind, spec)[start:stop].clone()
                if not filled:
                    data.fill_(UNTOUCHED)
                self.shards.append((kind, spec, start, stop, data))

    def expected(self, kind: str, spec: ParamSpec) -> Tensor:
        return local_shard(stamped(spec, kind), spec, self.tp, self.index).reshape(-1)

    def pieces(self, *, copies: bool) -> list[TensorPiece]:
        return [
            TensorPiece(
                f"{kind}/{spec.name}",
                torch.float32,
                spec.shape,
                box.offset,
                box.shape,
                data[box.flat_start - start : box.flat_start - start + box.numel],
            )
            for kind, spec, start, stop, data in self.shards
            for box in flat_range_boxes(spec, self.tp, self.index, start, stop)
            if copies or box.copy_index == 0
        ]

    def check(self) -> None:
        for kind, spec, start, stop, data in self.shards:
            assert torch.equal(data, self.expected(kind, spec)[start:stop]), (kind, spec.name)


def save_stamped(path: Path, tp: int, dp: int, seed: int = 0, *, step: int = 1, **fields) -> list:
    def work(world: Axis):
        rank = Rank(tp, dp, world.index, seed, filled=True)
        store = CheckpointStore(path, world, **fields)
        # Copies of KV heads and replicated parameters are offered by all, or only by their owner.
        pieces = rank.pieces(copies=bool(seed % 2))
        return store.save(step, pieces, state={"samples": 5}, meta=META)

    return simulate(tp * dp, work)


@pytest.mark.parametrize("seed", range(12))
def test_stamps_land_where_they_belong_under_any_other_layout(tmp_path, seed):
    draw = random.Random(seed)
    (tp, dp), (new_tp, new_dp) = [(draw.choice([1, 2, 4]), draw.choice([1, 2, 3])) for _ in "ab"]
    results = save_stamped(tmp_path, tp, dp, seed, max_file_bytes=draw.choice([900, 1 << 30]))
    assert results == [tmp_path / "step-1"] * (tp * dp)
    manifest = verify(tmp_path / "step-1")
    assert sum(torch.Size(t.shape).numel() for t in manifest.tensors.values()) == 3 * sum(
        spec.numel for spec in SPECS
    ), "padding or a copy was counted"

    def load(world: Axis):
        rank = Rank(new_tp, new_dp, world.index, seed + 100, filled=False)
        loaded = CheckpointStore(tmp_path, world).load(1, rank.pieces(copies=True), model=MODEL)
        rank.check()
        return loaded.step, loaded.state

    assert simulate(new_tp * new_dp, load) == [(1, {"samples": 5})] * (new_tp * new_dp)


def test_stamps_out_of_place_are_seen(tmp_path):
    """The negative control: a layout that is one row off must not pass the check above."""
    save_stamped(tmp_path, 2, 1)
    rank = Rank(2, 1, 1, 0, filled=False)
    pieces = rank.pieces(copies=True)
    victim = next(p for p in pieces if p.key == "param/blocks.1.mlp.up.weight")
    victim.offset = (victim.offset[0] - 1, 0)
    CheckpointStore(tmp_path, ALONE).load(1, pieces)
    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp\.up\.weight"):
        rank.check()


def single(value: float = 1.0, key: str = "param/w", dtype=torch.float32) -> TensorPiece:
    return TensorPiece(key, dtype, (4,), (0,), (4,), torch.full((4,), value).to(dtype))


def save(store: CheckpointStore, step: int, *pieces: TensorPiece, state=None) -> Path:
    return store.save(step, pieces or (single(step),), state=state or {}, meta=META)


def test_copies_are_written_once_and_by_all(tmp_path):
    def work(world: Axis):
        pieces = [single(i, f"param/{i}") for i in range(8)]
        save(CheckpointStore(tmp_path, world), 1, *pieces)

    assert simulate(4, work) == [None] * 4
    files = sorted((tmp_path / "step-1").glob("*.safetensors"))
    assert len(files) == 4
    headers = [f.read_bytes() for f in files]
    assert [h.count(b"param/") for h in headers] == [2] * 4


def test_ranks_with_nothing_to_write_write_nothing(tmp_path):
    """More ranks than elements: empty shards are neither pieces nor files."""
    empty = TensorPiece("param/w", torch.float32, (4,), (4,), (0,), torch.empty(0))

    def work(world: Axis):
        piece = empty if world.index else single()
        store = CheckpointStore(tmp_path, world)
        save(store, 1, piece)
        store.load(1, [empty])

    assert simulate(3, work) == [None] * 3
    assert len(list((tmp_path / "step-1").glob("*.safetensors"))) == 1


def test_state_comes_back_as_it_was(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    state = {
        "step": 3,
        "loss_scale": 0.1 + 0.2,
        "rng": [2**63 + 1, 5],
        "none": None,
        "s": "ä\u2028",
    }
    save(store, 3, state=state)
    assert store.load(3, []).state == state
    for bad in ({"a": float("nan")}, {"a": torch.ones(1)}, {"a": (1, 2)}, {1: 2}):
        with pytest.raises(CheckpointError):
            save(store, 4, state=bad)
    assert store.latest() == 3 and [e.name for e in tmp_path.iterdir()] == ["step-3"]


def test_states_that_differ_between_ranks_are_refused(tmp_path):
    def work(world: Axis):
        state = {"train": {"step": 1, "epoch": world.index // 2}, "id": 5}
        save(CheckpointStore(tmp_path, world), 1, state=state)

    results = simulate(3, work)
    assert [type(r) for r in results] == [CheckpointError] * 3
    assert all(str(r).endswith("rank 2's differs from rank 0's in train.epoch") for r in results)


def test_types_are_converted_between_floats_only(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    values = torch.tensor([1.0, 1.00390625, 3.3895e38, -0.1])
    save(store, 1, TensorPiece("param/w", torch.float32, (4,), (0,), (4,), values))
    half = single(0, dtype=torch.bfloat16)
    store.load(1, [half])
    assert torch.equal(half.data, values.to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="float32 and cannot become int64"):
        store.load(1, [single(0, dtype=torch.int64)])


def test_latest_is_the_newest_by_number_for_all(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    assert store.latest() is None and store.steps() == []
    for step in (9, 10, 2):
        save(store, step)
    (tmp_path / "step-11").mkdir()
    assert simulate(3, lambda world: CheckpointStore(tmp_path, world).latest()) == [10] * 3
    assert store.steps() == [2, 9, 10]


def test_keep_last(tmp_path):
    store = CheckpointStore(tmp_path, ALONE, keep=2)
    for step in range(1, 5):
        save(store, step)
    assert store.steps() == [3, 4]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    save(store, 1, single(1.0))
    save(store, 1, single(2.0))
    loaded = single(0.0)
    store.load(1, [loaded])
    assert loaded.data.tolist() == [2.0] * 4
    assert [e.name for e in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_write_that_fails_on_one_rank_fails_on_all(tmp_path, monkeypatch, failing):
    save(CheckpointStore(tmp_path, ALONE), 1)
    real = io.write_file

    def write_file(path, pieces):
        if path.name.startswith(f"rank{failing:05d}"):
            path.write_bytes(b"half")
            raise CheckpointError(f"cannot write {path}: [Errno 28] No space left on device")
        return real(path, pieces)

    monkeypatch.setattr(io, "write_file", write_file)

    def work(world: Axis):
        save(CheckpointStore(tmp_path, world, keep=1), 2, *[single(key=f"k{i}") for i in range(6)])

    results = simulate(3, work)
    assert [type(r) for r in results] == [CheckpointError] * 3
    assert all(f"rank {failing}: cannot write" in str(r) for r in results)
    assert all("No space left on device" in str(r) for r in results)
    assert CheckpointStore(tmp_path, ALONE).latest() == 1
    assert [e.name for e in tmp_path.iterdir()] == ["step-1"]


def test_pieces_that_do_not_fill_a_tensor_are_refused_before_anything_is_written(tmp_path):
    def work(world: Axis):
        offset = (2 * world.index,)
        piece = TensorPiece("param/w", torch.float32, (8,), offset, (2,), torch.ones(2))
        save(CheckpointStore(tmp_path / "sub", world), 2, piece)

    results = simulate(3, work)
    assert all("param/w: pieces cover 6 of the 8" in str(r) for r in results), results
    assert not (tmp_path / "sub").exists()


def test_data_that_does_not_fit_its_piece_is_refused_on_all(tmp_path):
    def work(world: Axis):
        piece = single()
        if world.index == 1:
            piece.data = torch.ones(3)
        save(CheckpointStore(tmp_path, world), 2, piece)

    results = simulate(2, work)
    assert all(
        "rank 1: param/w: 3 elements cannot be a piece of shape [4]" in str(r) for r in results
    ), results


def test_loading_what_is_not_there_names_it(tmp_path):
    store = CheckpointStore(tmp_path, ALONE)
    save(store, 1)
    with pytest.raises(CheckpointError, match="does not hold exp_avg/v, param/v"):
        store.load(1, [single(key="param/v"), single(key="exp_avg/v"), single()])
    other = TensorPiece("param/w", torch.float32, (5,), (0,), (4,), torch.empty(4))
    with pytest.raises(CheckpointError, match=r"param/w has shape \[4\], not \[5\]"):
        store.load(1, [other])
    with pytest.raises(CheckpointError, match="step-2"):
        store.load(2, [])
    with pytest.raises(CheckpointError, match=r"another model: norm: 'layernorm' .* 'rmsnorm'"):
        store.load(1, [], model=MODEL.model_copy(update={"norm": "rmsnorm"}))


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path):
    save(CheckpointStore(tmp_path, ALONE), 1)

    def work(world: Axis):
        CheckpointStore(tmp_path, world).load(
            1, [single(key="param/v" if world.index else "param/w")]
        )

    results = simulate(2, work)
    assert all("rank 1" in str(r) and "param/v" in str(r) for r in results)


def test_ranks_that_see_different_checkpoints_do_not_go_on(tmp_path):
    for step in (1, 2):
        save(CheckpointStore(tmp_path, ALONE), step)

    def work(world: Axis):
        CheckpointStore(tmp_path, world).load(1 + world.index, [])

    assert all("different steps: [1, 2]" in str(r) for r in simulate(2, work))


def damage(name: str, path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    match name:
        case "truncate":
            os.truncate(file, file.stat().st_size - 1)
        case "delete":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "header":
            raw = file.read_bytes()
            file.write_bytes(raw.replace(b"param", b"parom"))


@pytest.mark.parametrize("name", ["truncate", "delete", "empty", "header"])
def test_damage_is_found_and_named(tmp_path, name):
    store = CheckpointStore(tmp_path, ALONE)
    path = save(store, 1)
    damage(name, path)
    for look in (lambda: store.load(1, [single()]), lambda: verify(path)):
        with pytest.raises(CheckpointError, match=r"rank00000-part00000\.safetensors"):
            look()


def test_a_flipped_bit_is_found_by_verify(tmp_path):
    path = save(CheckpointStore(tmp_path, ALONE), 1)
    verify(path)
    file = next(path.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    assert raw[-16:] == struct.pack("<4f", 1, 1, 1, 1)
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"damaged: bytes 0 to \d+ have digest"):
        verify(path)


def save_and_load(rank: int, world_size: int, path: str) -> list[float]:
    world = mesh_for(ParallelLayout(dp=world_size), rank).world
    store = CheckpointStore(path, world, keep=1)
    half = torch.arange(3.0) + 10 * rank
    piece = TensorPiece("param/w", torch.float32, (6,), (3 * rank,), (3,), half)
    for step in (1, 2):
        store.save(step, [piece], state={"step": step}, meta=META)
    whole = TensorPiece("param/w", torch.float32, (6,), (0,), (6,), torch.zeros(6))
    loaded = store.load(store.latest(), [whole], model=MODEL)
    assert loaded.state == {"step": 2} and store.steps() == [2]
    return whole.data.tolist()


def test_two_processes_save_and_load(workers, tmp_path):
    results = workers(2).run(save_and_load, str(tmp_path))
    assert results == [[0, 1, 2, 10, 11, 12]] * 2


def save_on_a_full_disk(rank: int, world_size: int, path: str) -> tuple[str, int | None]:
    """Rank 1 may write no file larger than 4 KiB (RLIMIT_FSIZE), which its second save needs."""
    import resource

    store = CheckpointStore(path, mesh_for(ParallelLayout(dp=world_size), rank).world)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    try:
        for step, size in ((1, 8), (2, 4096)):
            data = torch.ones(size)
            piece = TensorPiece(f"param/{rank}", torch.float32, (size,), (0,), (size,), data)
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            store.save(step, [piece], state={}, meta=META)
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    return message, store.latest()


def test_a_disk_that_is_full_on_one_rank_stops_both(workers, tmp_path):
    for message, latest in workers(2).run(save_on_a_full_disk, str(tmp_path), timeout=30):
        assert "saving step 2: rank 1: cannot write" in message and "File too large" in message
        assert latest == 1
    assert [e.name for e in tmp_path.iterdir()] == ["step-1"]
