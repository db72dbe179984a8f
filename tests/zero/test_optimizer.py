"""ZeRO 0 and 1 against torch's own optimizers on one dense model.

The sizes include parameters smaller than the number of ranks, so some chunks hold padding only.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megads.config.schema import OptimConfig
from megads.kernels.reference import adamw
from megads.optim.update import make_update_rule
from megads.parallel import collectives
from megads.parallel.layout import ParallelLayout
from megads.parallel.sharding import Init, ParamSpec
from megads.zero.buckets import build_buckets
from megads.zero.optimizer import ZeroOptimizer
from tests.distributed import Workers, mesh_for

SHAPES = {"a": (7,), "b": (5, 3), "c": (1,), "d": (13,), "e": (11, 17), "unused": (2, 2)}
ROLES = {"a": "bias", "b": "matrix", "c": "norm", "d": "bias", "e": "embedding", "unused": "matrix"}
SAMPLES, STEPS = 8, 4


class Toy(nn.Module):
    """A scalar loss per sample in which every parameter but one takes part, unevenly."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x[:17] @ self.e.t()).sum() * self.c.sum()
        return y + (x[:13] * self.d).pow(2).sum() + (torch.outer(x[:5], self.a[:3]) * self.b).sum()


def values(name: str) -> Tensor:
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(len(name) + ord(name[0]))
    )


def sample(step: int, index: int) -> Tensor:
    return torch.randn(17, generator=torch.Generator().manual_seed(1000 * step + index))


def dense(config: OptimConfig) -> dict[str, Tensor]:
    model = Toy()
    params = {name: nn.Parameter(values(name)) for name in SHAPES}
    for name, param in params.items():
        setattr(model, name, param)
    decays = [p for n, p in params.items() if ROLES[n] in ("matrix", "embedding")]
    rest = [p for n, p in params.items() if ROLES[n] not in ("matrix", "embedding")]
    groups = [
        {"params": decays, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    else:
        for group in groups:
            group["weight_decay"] = 0.0
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    norms = []
    for step in range(STEPS):
        loss = sum(model(sample(step, i)) for i in range(SAMPLES)) / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        params["unused"].grad = torch.zeros(SHAPES["unused"])
        norms.append(nn.utils.clip_grad_norm_(params.values(), config.clip))
        optimizer.step()
    return {n: p.detach() for n, p in params.items()} | {"norms": torch.stack(norms)}


def run(
    rank: int, world: int, config: OptimConfig, stage: int, accumulate: int, sabotage: str
) -> dict[str, Tensor]:
    mesh = mesh_for(ParallelLayout(dp=world), rank)
    model = Toy()
    specs = {n: ParamSpec(n, SHAPES[n], ROLES[n], Init()) for n in SHAPES}
    buckets = build_buckets(
        [model], [specs], mesh, dtype=torch.float32, bucket_mb=400 / 2**20, sequence_parallel=False
    )
    assert len(buckets) > 1
    for name, param in model.named_parameters():
        param.data.copy_(values(name))
    rule = make_update_rule(config, adamw)
    optimizer = ZeroOptimizer(buckets, mesh, rule, config, stage=stage)
    norms, per_rank = [], SAMPLES // world
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = [sample(step, rank * per_rank + i) for i in range(per_rank)]
        size = per_rank // accumulate
        for m in range(accumulate):
            is_last = m == accumulate - 1 and sabotage != "no reduction"
            if sabotage == "early reduction":
                is_last = True
            optimizer.gradients.before_backward(0, m, is_last=is_last)
            loss = sum(model(x) for x in mine[m * size : (m + 1) * size]) / SAMPLES
            loss.backward()
        if sabotage != "no reduction":
            optimizer.finish_gradients()
        norm = optimizer.grad_norm()
        norms.append(norm)
        clip = min(1.0, config.clip / (norm + 1e-6))
        optimizer.step(config.lr, grad_divisor=1 / clip)
    out = {n: p.detach().clone() for n, p in model.named_parameters()}
    peers = collectives.all_gather_object(out, mesh.world)
    assert all(torch.equal(peer[n], out[n]) for peer in peers for n in out)
    assert all(p.grad is None for p in model.parameters())
    owned = sum(p.numel for p in optimizer.pieces(only_owned=True, kinds=["param"]))
    total = sum(collectives.all_gather_object(owned, mesh.world))
    assert total == sum(torch.Size(s).numel() for s in SHAPES.values())
    return out | {"norms": torch.tensor(norms)}


ADAM = OptimConfig(lr=0.05, weight_decay=0.3, clip=0.7)
SGD = OptimConfig(name="sgd", lr=1.0, weight_decay=0.0, clip=0.5)
HEAVY_BALL = OptimConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, clip=0.5)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("config", [ADAM, SGD, HEAVY_BALL], ids=["adamw", "sgd", "heavy_ball"])
def test_equals_dense_optimizer(
    workers: Workers, stage: int, world: int, config: OptimConfig
) -> None:
    expected = dense(config)
    for accumulate in (1, 2):
        for got in workers(world).run(run, config, stage, accumulate, ""):
            for name, value in expected.items():
                torch.testing.assert_close(
                    got[name], value.to(got[name].dtype), rtol=2e-5, atol=2e-6
                )


def test_negative_control_unreduced_gradients_are_noticed(workers: Workers) -> None:
    with pytest.raises(AssertionError):
        workers(2).run(run, SGD, 0, 2, "no reduction")


def test_negative_control_reducing_after_each_microbatch_is_noticed(workers: Workers) -> None:
    expected = dense(SGD)
    got = workers(2).run(run, SGD, 0, 2, "early reduction")[0]
    assert not torch.allclose(got["e"], expected["e"], atol=1e-3)
