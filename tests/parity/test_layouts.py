"""The curve of a run does not depend on its layout: loss and gradient norm, fp32.

Ten steps each; `tests.parity.command_line` makes the same table with twenty, by the command. The
single process is itself held against a dense oracle in test_dense_oracle.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.config.schema import Config
from tests import training
from tests.distributed import Workers
from tests.training import FAMILIES, assert_same_curve, run_training, tiny_config, write_tokens
from tests.zero.faults import patched, spoil

STEPS = 10
SP = "parallel.sequence_parallel=true"
LAYOUTS: dict[str, list[str]] = {
    "tp2": ["parallel=tp2"],
    "tp2 sp": ["parallel=tp2", SP],
    "pp2": ["parallel=pp2"],
    "pp4 gpipe": ["parallel=pp4", "parallel.schedule=gpipe"],
    "dp2": ["parallel=dp2"],
    "dp4zero1 small buckets": [
        "parallel=dp4zero1",
        "train.micro_batch_size=2",
        "parallel.bucket_mb=0.002",
    ],
    "tp2pp2": ["parallel=tp2pp2"],
    "tp2pp2 sp": ["parallel=tp2pp2", SP],
    "tp2dp2zero1": ["parallel=tp2dp2zero1"],
    "pp2dp2zero1": ["parallel=pp2dp2zero1"],
    "pp2vpp2": ["parallel=pp2vpp2"],
    "tp4 with 2 kv heads": ["parallel=tp4"],
    "tp4 with 2 kv heads sp": ["parallel=tp4", SP],
    "micro batch 1": ["train.micro_batch_size=1"],
    "micro batch 2": ["train.micro_batch_size=2"],
    "micro batch 1 pp2": ["parallel=pp2", "train.micro_batch_size=1"],
    "reference kernels": ["kernels=reference"],
}
SOME = ("tp2 sp", "pp2dp2zero1", "tp4 with 2 kv heads")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def short(directory: Path, data: str, family: str, *overrides: str) -> Config:
    """A run whose schedule is made for more steps than it takes."""
    return tiny_config(directory, data, family, f"train.steps={STEPS}", *overrides)


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory, data: str, workers: Workers
) -> dict[str, list[dict[str, Any]]]:
    curves = {}
    for family in FAMILIES:
        curves[family] = run_training(
            workers, short(tmp_path_factory.mktemp("single"), data, family)
        )
        still = ["optim.lr=0", "optim.min_lr=0"]
        config = short(tmp_path_factory.mktemp("still"), data, family, *still)
        moved, stays = (
            training.column(curve, "loss")[-3:]
            for curve in (curves[family], run_training(workers, config))
        )
        shown = (moved - stays).abs().mean() > 4e-3 * stays.mean()
        assert shown, "updates do not show in these curves"
    return curves


PAIRS = [(f, x) for f in ("gpt", "llama") for x in LAYOUTS]
# The layouts that matter to what these families have of their own.
PAIRS += [(f, x) for f in ("bloom", "neox") for x in SOME]


@pytest.mark.parametrize("family,layout", PAIRS)
def test_same_curve(
    tmp_path: Path, data: str, workers: Workers, single: dict[str, Any], family: str, layout: str
) -> None:
    got = run_training(workers, short(tmp_path, data, family, *LAYOUTS[layout]))
    assert len(got) == STEPS
    assert_same_curve(got, single[family])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_initial_weights_are_bitwise_equal(
    tmp_path: Path, data: str, workers: Workers, family: str
) -> None:
    def weights(*overrides: str) -> dict[str, torch.Tensor]:
        config = tiny_config(
            tmp_path / "_".join(overrides).replace("=", "-"), data, family, *overrides
        )
        world = training.world_size(config)
        return training.assemble(workers(world).run(training.gathered_weights, config, ["param"]))

    want = weights()
    matrices = [k for k in want if want[k].dim() == 2]
    for a, b in itertools.pairwise(matrices):
        assert want[a].shape != want[b].shape or not torch.equal(want[a], want[b])
    for layout in ("tp2", "tp4", "pp2", "dp2zero1", "tp2pp2"):
        got = weights(f"parallel={layout}")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    other = weights("train.seed=77")
    assert not any(torch.equal(other[key], want[key]) for key in matrices)


# Each fault below is one that keeps a falling, plausible loss; the curve must show it.


def skip_copies(rank: int, kind: str) -> Callable[[], None]:
    """Gradients of parameters of one kind are not summed over their copies."""
    from megads.zero.grads import BucketReducer

    original = BucketReducer.copies

    def copies(self: BucketReducer, which: Any) -> Any:
        return iter(()) if which == kind else original(self, which)

    return patched(BucketReducer, "copies", copies)


def forget_microbatches(rank: int) -> Callable[[], None]:
    """The gradient of all but the last microbatch is lost."""
    from megads.zero.grads import GradientBuckets

    original = GradientBuckets.before_backward

    def before_backward(self: GradientBuckets, chunk: int, *, is_last: bool) -> None:
        for reducer in self._reducers:
            if reducer.bucket.plan.chunk == chunk:
                reducer._forget()
        original(self, chunk, is_last=is_last)

    return patched(GradientBuckets, "before_backward", before_backward)


def mean_of_means(rank: int) -> Callable[[], None]:
    """The gradient is divided by this rank's tokens instead of all ranks'."""
    from megads.train import step

    original = step.count_loss_tokens
    return patched(
        step,
        "count_loss_tokens",
        lambda microbatches, mesh: original(microbatches, mesh) // mesh.dp.size,
    )


def same_samples(rank: int) -> Callable[[], None]:
    """All data-parallel ranks read the first one's samples."""
    from megads.data.loader import TokenLoader

    original = TokenLoader.batches

    def batches(self: TokenLoader, *args: int) -> Any:
        return original(self, *args[:-1], 0)

    return patched(TokenLoader, "batches", batches)


FAULTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "norms partial": ("tp2 sp", skip_copies, ("tp_partial",)),
    "tied embedding partial": ("pp2", skip_copies, ("tied",)),
    "kv heads partial": ("tp4 with 2 kv heads", skip_copies, ("kv",)),
    "no data-parallel sum": ("dp2", spoil, ("no reduction",)),
    "no data-parallel sum zero1": ("dp4zero1 small buckets", spoil, ("no reduction",)),
    "accumulation lost": ("micro batch 1", forget_microbatches, ()),
    "mean of means": ("dp2", mean_of_means, ()),
    "same samples": ("dp2", same_samples, ()),
    "norm of a stage": ("pp2", spoil, ("own norm",)),
    "norm of a tp rank": ("tp2", spoil, ("own norm",)),
    "norm of a zero shard": ("tp2dp2zero1", spoil, ("own norm",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control(
    tmp_path: Path, data: str, workers: Workers, single: dict[str, Any], fault: str
) -> None:
    layout, fault_of, args = FAULTS[fault]
    config = short(tmp_path, data, "gpt", *LAYOUTS[layout])
    got = run_training(workers, config, fault_of, *args)
    with pytest.raises(AssertionError):
        assert_same_curve(got, single["gpt"], rtol=1e-4)
