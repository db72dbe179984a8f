"""What a run's data does on a resume: plans of older checkpoints, limits, ranks that disagree."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megads.config.schema import Config
from megads.data.loader import TokenLoader, open_loader
from megads.data.prepare import prepare_data
from megads.data.sampler import samples_of
from megads.data.source import check_sources
from megads.errors import DataError
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from megads.train.data import continue_plan, require_same_data
from megads.train.state import TrainState
from tests import training
from tests.distributed import Workers, mesh_for
from tests.parity import dense
from tests.training import run_training, tiny_config, write_tokens


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sources")
    return [
        write_tokens(folder / name, documents=number) for name, number in (("a", 20), ("b", 12))
    ]


def opened(folder: Path, paths: list[str], *words: str) -> tuple[Config, TokenLoader]:
    config = tiny_config(
        folder, "", "gpt", f"data.paths=[{','.join(paths)}]", "data.valid_fraction=0", *words
    )
    return config, open_loader(config, prepare_data(config), "train")


def go_on(config: Config, loader: TokenLoader, state: TrainState) -> list[str]:
    return continue_plan(config, loader, state)


def test_a_fresh_run_records_its_plan(tmp_path: Path, sources: list[str]) -> None:
    config, loader = opened(tmp_path, sources)
    state = TrainState()
    assert go_on(config, loader, state) == []
    assert state.data_plan == json.loads(json.dumps(loader.plan.to_dict()))
    assert [s["name"] for s in state.data_plan["sources"]] == ["a", "b"]


def test_a_checkpoint_from_before_plans_goes_on_in_its_order(
    tmp_path: Path, sources: list[str]
) -> None:
    """One source was read by the run's seed, then; the rest of it still is, now and later."""
    config, loader = opened(tmp_path, sources[:1])
    total = loader.num_samples
    places = np.arange(3 * total)
    old = samples_of(np.zeros_like(places), places, [total], [config.train.seed]).tolist()
    assert loader.sample_ids(0, total) != old[:total]
    state = TrainState(step=2, samples=16)
    assert go_on(config, loader, state) == []
    assert loader.sample_ids(16, 2 * total) == old[16 : 16 + 2 * total]
    config, again = opened(tmp_path, sources[:1])
    later = TrainState(step=3, samples=24, data_plan=state.data_plan)
    assert go_on(config, again, later) == []
    assert again.sample_ids(24, total) == old[24 : 24 + total]
    config, several = opened(tmp_path, sources)
    assert "warning" in go_on(config, several, TrainState(step=2, samples=16))[0]


def test_files_that_moved_and_files_that_changed(tmp_path: Path, sources: list[str]) -> None:
    config, loader = opened(tmp_path, sources)
    state = TrainState(step=1, samples=8)
    state.data_plan = loader.plan.to_dict()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"moved{suffix}").write_bytes(Path(sources[0] + suffix).read_bytes())
    config, moved = opened(tmp_path, [str(tmp_path / "moved"), sources[1]])
    assert go_on(config, moved, state) == []
    assert moved.sample_ids(8, 60) == loader.sample_ids(8, 60)
    content = bytearray((tmp_path / "moved.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "moved.bin").write_bytes(content)
    config, changed = opened(tmp_path, [str(tmp_path / "moved"), sources[1]])
    (note,) = go_on(config, changed, state)
    assert "a is no longer read, moved is new" in note


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["data.epochs=1"], "needs 800 samples but"),
        (["data.limits=[30,10]"], "needs 800 samples but data.epochs and data.limits allow 40;"),
        (
            ["data.limits=[30,10]", "data.skip=[[5,8]]", "train.steps=5"],
            "needs 43 samples, 3 skipped ones included, but data.epochs and data.limits allow 40;",
        ),
    ],
)
def test_a_run_longer_than_its_limits(
    tmp_path: Path, sources: list[str], words: list[str], needed: str
) -> None:
    config, loader = opened(tmp_path, sources, "train.steps=100", *words)
    with pytest.raises(DataError, match=f"train.steps=.*{needed}"):
        go_on(config, loader, TrainState())
    with pytest.raises(DataError, match=f"train.steps=.*{needed}"):  # and before any worker starts
        check_sources(config, prepare_data(config), is_new=True)
    check_sources(config, prepare_data(config), is_new=False)
    config, loader = opened(tmp_path, sources, *words, "train.steps=4")
    assert go_on(config, loader, TrainState()) == []
    check_sources(config, prepare_data(config), is_new=True)


def test_evaluation_tells_sources_apart(
    tmp_path: Path, sources: list[str], workers: Workers
) -> None:
    """Against a dense model over the samples of each source; the mean is over all tokens."""
    options = [f"data.paths=[{','.join(sources)}]", "data.valid_fraction=0.2", "eval.every=1"]
    options += ["eval.steps=50", "train.steps=1", "optim.lr=0", "optim.min_lr=0"]
    config = tiny_config(tmp_path / "single", "", "gpt", *options)
    (pieces,) = workers(1).run(training.gathered_weights, config, ["param"])
    weights = {k.removeprefix("param/"): v for k, v in training.assemble([pieces]).items()}
    loader = open_loader(config, prepare_data(config), "valid")
    expected, counts = {}, [source.num_samples for source in loader.sources]
    assert all(counts) and counts[1] % 4, "rows that count nothing have to fill up a batch"
    for name, source in zip("ab", loader.sources, strict=True):
        rows = torch.stack([torch.from_numpy(source.read(k)) for k in range(source.num_samples)])
        predicted = dense.logits(weights, config.model, rows[:, :-1])
        expected[name] = F.cross_entropy(predicted.flatten(0, 1), rows[:, 1:].flatten()).item()
    mean = np.average(list(expected.values()), weights=counts)
    assert abs(mean - np.mean(list(expected.values()))) > 1e-4, "a mean of means is another"
    for layout, names in (("single", ""), ("dp2", "first,second"), ("pp2", "")):
        words = [*options, f"parallel={layout}", f"data.valid_names=[{names}]"]
        config = tiny_config(tmp_path / layout, "", "gpt", *words)
        (line,) = [x for x in run_training(workers, config) if "val_loss" in x]
        called = names.split(",") if names else ["a", "b"]
        expected = dict(zip(called, expected.values(), strict=True))
        assert line["val_loss_by_source"] == pytest.approx(expected, rel=1e-5)
        assert line["val_loss"] == pytest.approx(mean, rel=1e-5)
        perplexities = {name: math.exp(loss) for name, loss in expected.items()}
        assert line["val_ppl_by_source"] == pytest.approx(perplexities, rel=1e-4)


def test_ranks_that_read_other_files(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loader = opened(tmp_path, sources)
    world = Mesh.single("cpu").world
    require_same_data([loader], world)
    mine = [(s.name, s.identity) for s in loader.planned]
    monkeypatch.setattr(
        "megads.parallel.collectives.all_gather_object",
        lambda value, axis: [mine, [mine[0], ("b", "another")]],
    )
    with pytest.raises(DataError, match=r"b: rank 1 reads other content \(another\) than rank 0"):
        require_same_data([loader], world)


def samples_seen(rank: int, world: int, config: Config, delay_s: float) -> list[list[int]]:
    """What this rank reads, when the rank that tokenizes takes its time."""
    import time

    from megads.train import data

    original = data.prepare_data

    def slow(config: Config) -> object:
        if rank == 0:
            time.sleep(delay_s)
        return original(config)

    data.prepare_data = slow  # type: ignore[assignment]
    try:
        loader, _ = data.build_loaders(config, mesh_for(ParallelLayout(tp=world), rank))
    finally:
        data.prepare_data = original
    tokens = [row for batch in loader.batches(0, 4, 2, 1, 0) for row in batch.tokens.tolist()]
    loader.close()
    return tokens


def test_nobody_reads_what_is_not_there_yet(tmp_path: Path, workers: Workers) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question " * 30)
    words = [f"data.paths=[{tmp_path / 'a.txt'}]", "model.vocab_size=257"]
    config = tiny_config(tmp_path / "run", "", "gpt", *words)
    first, second = workers(2).run(samples_seen, config, 1.5)
    assert first == second and len(first) == 4
