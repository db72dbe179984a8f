"""What forward passes keep for backward ones: as much as is published, and none of it matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megads.config.model import ModelConfig
from megads.models.saved import SavedTensors
from megads.parallel.layout import ParallelLayout
from megads.parallel.mesh import Mesh
from tests.distributed import Workers, mesh_for
from tests.models.stages import (
    Chunk,
    make_stage,
    random_batch,
    random_weights,
    with_dropout,
)
from tests.models.test_gpt import SEQ, config_of

HOST = {"saved": SavedTensors(offloads=True)}
KEEPING: dict[str, dict[str, Any]] = {
    "everything": {},
    "selective": {"recompute": "selective"},
    "some": {"recompute": "full", "recompute_layers": 1},
    "full": {"recompute": "full"},
    "everything on the host": HOST,
    "some on the host": {"recompute": "full", "recompute_layers": 1, **HOST},
}


@pytest.mark.parametrize("keeping", [name for name in KEEPING if name != "everything"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("variant", ["gpt", "llama", "neox"])
def test_what_is_kept_changes_no_bit_of_the_gradient(
    workers: Workers, variant: str, tp: int, sp: bool, keeping: str
) -> None:
    config = config_of(variant, num_layers=2, hidden_dropout=0.5, attention_dropout=0.5)
    batches = [random_batch(config, batch=2, seq=SEQ, seed=i) for i in range(2)]
    batches[1].index = 1
    results = []
    for how in ("everything", keeping):
        options = {**KEEPING[how], "sequence_parallel": sp}
        arguments = (config, random_weights(config), batches, options)
        results.append(
            [with_dropout(0, 1, *arguments)]
            if tp == 1
            else workers(tp).run(with_dropout, *arguments)
        )
    for plain, again in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], again[0], strict=True))
        for name, grad in plain[1].items():
            assert torch.equal(grad, again[1][name]), name


SIZES = {"hidden_size": 24, "num_attention_heads": 8, "num_kv_heads": 8, "head_dim": 3}
BATCH = 3


def kept_by_layers(
    rank: int, world_size: int, config: ModelConfig, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Bytes on the device and on the host after the forward pass of one and of two layers, and
    what is still there after the backward pass."""
    mesh = mesh_for(ParallelLayout(tp=world_size), rank) if world_size > 1 else Mesh.single()
    kept = []
    for layers in (1, 2):
        saved = SavedTensors(counts=True, offloads=options.get("offloads", False))
        how = {key: value for key, value in options.items() if key != "offloads"}
        stage = make_stage(
            config,
            random_weights(config),
            mesh,
            chunk=Chunk(range(layers)),
            saved=saved,
            dtype=torch.bfloat16,
            **how,
        )
        stage.dropout_rng.seed(1)
        loss = stage(None, random_batch(config, batch=BATCH, seq=SEQ))
        kept.append((saved.device.now, saved.host.now))
        loss.backward()
        assert (saved.device.now, saved.host.now) == (0, 0)
    return kept


def kept_by_a_layer(
    workers: Workers, config: ModelConfig, tp: int, **options: Any
) -> tuple[int, int]:
    arguments = (config, options)
    each = (
        [kept_by_layers(0, 1, *arguments)]
        if tp == 1
        else workers(tp).run(kept_by_layers, *arguments)
    )
    one, two = each[-1]
    return two[0] - one[0], two[1] - one[1]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, True)])
def test_bytes_of_a_layer_are_the_published_ones(workers: Workers, tp: int, sp: bool) -> None:
    """Korthikanti et al. 2022, table 2, in bytes for a 16-bit type with dropout: s b h (10 + 24/t),
    with sequence parallelism 34 s b h / t; the attention core 5 a s^2 b / t unless it is selected
    for recomputation; 2 s b h or 2 s b h / t with full recomputation. On top here: two statistics
    of each norm, and two bytes more for the softmax, which is fp32."""
    config = config_of("gpt", num_layers=2, hidden_dropout=0.1, **SIZES, ffn_hidden_size=96)
    tokens, hidden, heads = SEQ * BATCH, 24, 8
    stream = tokens * hidden
    statistics = 8 * tokens // (tp if sp else 1)
    linear = stream * 34 // tp if sp else stream * 10 + stream * 24 // tp
    core = heads * SEQ * tokens // tp
    logsumexp = 4 * heads * tokens // tp

    def kept(**options: Any) -> int:
        return kept_by_a_layer(workers, config, tp, sequence_parallel=sp, **options)[0]

    assert kept(recompute="selective") == linear + statistics
    assert kept(recompute="full") == 2 * stream // (tp if sp else 1)
    assert kept() == linear + statistics + logsumexp
    config = config.model_copy(update={"attention_dropout": 0.1})
    assert kept() == linear + statistics + (5 + 2) * core
    assert kept(recompute="selective") == linear + statistics


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_layers_keep_nothing_on_the_device(workers: Workers, recompute: str) -> None:
    config = config_of("gpt", num_layers=2, hidden_dropout=0.1, **SIZES, ffn_hidden_size=96)
    here, _ = kept_by_a_layer(workers, config, 1, recompute=recompute)
    device, host = kept_by_a_layer(workers, config, 1, recompute=recompute, offloads=True)
    assert device == 0
    twice = 2 * SEQ * BATCH * 24 if recompute == "none" else 0  # what two operations read
    assert host == here + twice


def test_only_what_autograd_saves_is_counted() -> None:
    """Two tensors of one storage count once, a parameter and a table not at all."""
    saved, table = SavedTensors(counts=True), torch.ones(4, 5)
    weight = torch.nn.Parameter(torch.randn(4, 5))
    with saved.of_pass([weight], lambda: [table]):
        x = torch.randn(4, 5, requires_grad=True) * weight  # saves both; x's storage is new
        parts = x[:2].square().sum() + x[2:].square().sum() + (x * table).sum()
    # The leaf, and x once; not the weight, not the table.
    assert saved.device.now == 2 * 4 * 5 * 4
    parts.backward()
    assert saved.device.now == 0 and saved.device.peak == 2 * 4 * 5 * 4
