"""The curve of a run depends on no ZeRO stage and on no place of its state.

Buckets and streaming buffers are so small that every unit has buckets of its own and every shard
several pieces. Ten steps each; `tests.parity.command_line zero` makes the whole product with
twenty, by the command. The single process is held against a dense oracle in test_dense_oracle.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import training
from tests.distributed import Workers
from tests.training import (
    assert_same_curve,
    read_checkpoint,
    run_training,
    tiny_config,
    world_size,
    write_tokens,
)
from tests.zero.faults import spoil

STEPS = 10
# A key bias has no gradient but for rounding, which Adam would make large with the usual eps.
COMMON = [
    f"train.steps={STEPS}",
    "checkpoint.save_last=true",
    "optim.eps=1e-4",
]
SMALL = ["parallel.bucket_mb=0.004", "parallel.offload_budget_mb=0.05"]
SP = "parallel.sequence_parallel=true"
HALVES = "parallel.zero_shard_size=2"


class Case(NamedTuple):
    layout: str
    offload: str
    micro_batch: int
    family: str = "gpt"
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = " ".join(o.partition(".")[2] for o in self.others)
        return f"{self.family} {self.layout} {self.offload} micro{self.micro_batch} {rest}".strip()

    @property
    def overrides(self) -> list[str]:
        layout = [f"parallel={self.layout}"] if self.layout else []
        place = [f"parallel.offload={self.offload}", f"train.micro_batch_size={self.micro_batch}"]
        return [*layout, *place, *SMALL, *self.others]


# Not the product, which the command has with its layout of eight ranks: each stage with each
# offload, each layout of up to four with stages 2 and 3, without accumulation and over two and four
# microbatches: the first, the last and those between them are treated each in its own way.
CASES = [
    Case("dp2", "cpu", 1),
    Case("dp2zero1", "cpu", 4),
    Case("dp2zero1", "nvme", 1),
    Case("dp2zero2", "none", 1),
    Case("dp2zero2", "cpu", 4),
    Case("dp2zero2", "nvme", 1),
    Case("dp2zero3", "none", 4),
    Case("dp2zero3", "none", 2, others=("train.recompute=full",)),
    Case("dp2zero3", "cpu", 1, "llama"),
    Case("dp2zero3", "nvme", 4, "llama"),
    Case("dp4zero2", "none", 1),
    Case("dp4zero3", "nvme", 2, others=(HALVES,)),
    Case("tp2dp2zero2", "cpu", 2, others=(SP,)),
    Case("tp2dp2zero3", "none", 4),
    Case("tp2dp2zero3", "nvme", 2, "llama", (SP, "train.recompute=full")),
    Case("pp2dp2zero2", "none", 1),
    Case("pp2dp2zero3", "nvme", 2),
    Case("pp2vpp2dp2zero3", "none", 2),
    Case("pp2vpp2dp2zero2", "cpu", 1, "llama"),
    Case("", "cpu", 4, others=("parallel.zero=2",)),
    Case("", "nvme", 1, others=("parallel.zero=3",)),
    Case("pp2dp2zero3", "cpu", 2, others=("train.recompute=selective",)),
]


class Single(NamedTuple):
    """What one process without ZeRO makes of a family."""

    curve: list[dict[str, Any]]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory, data: str, workers: Workers
) -> dict[str, Single]:
    made = {}
    for family in ("gpt", "llama"):
        directory = tmp_path_factory.mktemp(family)
        curve = run_training(workers, tiny_config(directory, data, family, *COMMON))
        made[family] = Single(curve, read_checkpoint(directory / f"checkpoints/step-{STEPS}"))
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_curve_and_state(
    tmp_path: Path, data: str, workers: Workers, single: dict[str, Single], case: Case
) -> None:
    config = tiny_config(tmp_path, data, case.family, *COMMON, *case.overrides)
    got, want = run_training(workers, config), single[case.family]
    assert len(got) == STEPS
    assert_same_curve(got, want.curve)
    tensors = read_checkpoint(tmp_path / f"checkpoints/step-{STEPS}")
    assert tensors.keys() == want.tensors.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, want.tensors[key], rtol=1e-6, atol=1e-6, msg=key)
    assert not list(tmp_path.rglob("*megads-offload*")), "a state file was left behind"


@pytest.mark.parametrize("layout,offload", [("tp2dp2zero3", "none"), ("tp2dp2zero2", "nvme")])
def test_kv_heads_with_copies(
    tmp_path: Path, data: str, workers: Workers, layout: str, offload: str
) -> None:
    """Both tensor-parallel ranks hold the one KV head."""
    options = [*COMMON, "model.num_kv_heads=1"]
    want = run_training(workers, tiny_config(tmp_path / "single", data, "llama", *options))
    case = Case(layout, offload, 2)
    got = run_training(
        workers, tiny_config(tmp_path / "zero", data, "llama", *options, *case.overrides)
    )
    assert_same_curve(got, want)
    tensors = read_checkpoint(tmp_path / f"single/checkpoints/step-{STEPS}")
    for key, tensor in read_checkpoint(tmp_path / f"zero/checkpoints/step-{STEPS}").items():
        torch.testing.assert_close(tensor, tensors[key], rtol=1e-6, atol=1e-6, msg=key)


SGD = ["optim.name=sgd", "optim.lr=1.0", "optim.min_lr=1.0", "optim.momentum=0"]
SGD += ["optim.weight_decay=0", "optim.clip=0", "optim.warmup=0", "optim.schedule=constant"]
SGD += ["train.steps=1", "checkpoint.save_last=true"]


def test_one_step_of_gradient_descent_is_the_dense_gradient(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """With rate 1 the change of a weight is its gradient; Adam would hide a wrong scale."""

    def change(name: str, *overrides: str) -> dict[str, Tensor]:
        config = tiny_config(tmp_path / name, data, "gpt", *SGD, *overrides)
        first = workers(world_size(config)).run(training.gathered_weights, config, ["param"])
        before = training.assemble(first)
        run_training(workers, config)
        after = read_checkpoint(tmp_path / name / "checkpoints/step-1")
        assert after.keys() == before.keys()
        return {key: before[key] - after[key] for key in before}

    want = change("single")
    # Of a tied embedding, of norms, biases and matrices: each has moved.
    assert all(bool((gradient.abs() > 1e-4).any()) for gradient in want.values())
    for case in (
        Case("dp2zero1", "cpu", 1),
        Case("dp2zero2", "none", 1),
        Case("dp2zero3", "nvme", 2),
        Case("pp2dp2zero3", "cpu", 2),
        Case("tp2dp2zero2", "nvme", 1, others=(SP,)),
    ):
        got = change(str(case).replace(" ", "_").replace("=", "_"), *case.overrides)
        for key, gradient in got.items():
            torch.testing.assert_close(gradient, want[key], rtol=0, atol=1e-6, msg=f"{case} {key}")


FAULTY = [
    ("no reduction", Case("dp2zero2", "none", 1)),
    ("last microbatch only", Case("dp2zero2", "none", 1)),
    ("last microbatch only", Case("dp2zero3", "nvme", 2)),
    ("stale parameters", Case("dp2zero3", "none", 4)),
    ("stale parameters", Case("dp2zero3", "nvme", 2)),
    ("no replica sum", Case("dp4zero3", "none", 2, others=(HALVES,))),
    ("own norm", Case("dp2zero2", "cpu", 4)),
]


@pytest.mark.parametrize("fault,case", FAULTY, ids=[f"{fault} {case}" for fault, case in FAULTY])
def test_negative_control(
    tmp_path: Path,
    data: str,
    workers: Workers,
    single: dict[str, Single],
    fault: str,
    case: Case,
) -> None:
    # A save would refuse ranks that do not agree.
    options = [*COMMON, *case.overrides, "checkpoint.save_last=false"]
    got = run_training(workers, tiny_config(tmp_path, data, case.family, *options), spoil, fault)
    with pytest.raises(AssertionError):
        assert_same_curve(got, single[case.family].curve, rtol=1e-4)
