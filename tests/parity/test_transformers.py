"""Logits, losses and gradients of every family against `transformers`, all parameters random."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.config.model import ModelConfig
from megads.parallel.batch import MicroBatch
from tests.distributed import Workers
from tests.models.huggingface import FAMILIES, SEQ
from tests.models.stages import (
    Outcome,
    assemble_gradients,
    assert_gradients_close,
    random_batch,
    run_rank,
)

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "hf"
LOGITS_TOLERANCE = 1e-4


@functools.cache
def oracle(family: str) -> tuple[ModelConfig, dict[str, Tensor], MicroBatch, Outcome]:
    """Our config, global weights, a batch, and what `transformers` makes of them."""
    made = FAMILIES[family]
    model = made.build()
    batch = random_batch(made.config, batch=3, seq=SEQ)
    logits = model(batch.tokens).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    assert batch.loss_mask is not None
    loss = (losses * batch.loss_mask.flatten()).sum()
    loss.backward()
    outcome = Outcome(logits.detach(), loss.detach(), made.tensors(model, gradients=True))
    return made.config, made.tensors(model), batch, outcome


def run(
    workers: Workers, tp: int, family: str, config: ModelConfig | None = None, **options: Any
) -> list[Outcome]:
    own_config, weights, batch, _ = oracle(family)
    arguments = (config or own_config, weights, batch, options)
    return [run_rank(0, 1, *arguments)] if tp == 1 else workers(tp).run(run_rank, *arguments)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2 sp"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(
    workers: Workers, family: str, tp: int, *, sequence_parallel: bool
) -> None:
    check(workers, family, tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fewer_kv_heads_than_ranks(
    workers: Workers, family: str, *, sequence_parallel: bool
) -> None:
    """2 KV heads on 4 ranks: copies, whose gradients sum to the head's."""
    check(workers, family, 4, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_kernels(workers: Workers, family: str) -> None:
    check(workers, family, 1, kernels="reference")


def check(
    workers: Workers, family: str, tp: int, *, sequence_parallel: bool = False, **options: Any
) -> None:
    config, _, _, expected = oracle(family)
    outcomes = run(workers, tp, family, sequence_parallel=sequence_parallel, **options)
    assert expected.logits.std() > 0.5
    for outcome in outcomes:
        assert outcome.logits.shape == expected.logits.shape
        assert (outcome.logits - expected.logits).abs().max() < LOGITS_TOLERANCE
        torch.testing.assert_close(outcome.loss, expected.loss, rtol=1e-5, atol=0)
    grads = assemble_gradients(config, outcomes, sequence_parallel=sequence_parallel)
    assert_gradients_close(grads, expected.grads)


@pytest.mark.parametrize(
    ("family", "change"),
    [(name, change) for name, family in FAMILIES.items() for change in family.wrong],
)
def test_a_wrong_config_is_seen(workers: Workers, family: str, change: str) -> None:
    """Negative control: one wrong choice moves the logits by far more than the tolerance."""
    config, _, _, expected = oracle(family)
    broken = ModelConfig.model_validate(config.model_dump() | FAMILIES[family].wrong[change])
    (outcome,) = run(workers, 1, family, broken)
    assert (outcome.logits - expected.logits).abs().max() > 10 * LOGITS_TOLERANCE


def test_unsummed_partial_gradients_are_seen(workers: Workers) -> None:
    """Negative control: one rank's share of a norm gradient is not the gradient."""
    config, _, _, expected = oracle("gpt2")
    outcomes = run(workers, 2, "gpt2", sequence_parallel=True)
    grads = assemble_gradients(config, outcomes, sequence_parallel=True)
    for name in ("final_norm.weight", "blocks.0.attn.out.bias", "embedding.position.weight"):
        mine = grads | {name: outcomes[0].grads[name]}
        with pytest.raises(AssertionError, match=name):
            assert_gradients_close(mine, expected.grads)


HF_CASES = {
    "gpt2": {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "max_seq_length": 64},
    "bloom": {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "position": "alibi",
        "embedding_norm": True,
    },
    "llama31_tied": {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_kv_heads": 3,
        "ffn_hidden_size": 96,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": 500000.0,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_seq_length": 32},
        "qkv_bias": False,
        "attn_out_bias": False,
        "mlp_bias": False,
    },
}


@pytest.mark.parametrize("case", HF_CASES)
def test_recorded_logits(case: str) -> None:
    """Logits that `transformers` wrote on another machine."""
    np, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.torch")
    folder = CASES / case
    if not folder.is_dir():
        pytest.skip(f"no recorded models in {CASES}")
    family = FAMILIES[{"llama31_tied": "llama"}.get(case, case)]
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = ModelConfig.model_validate(HF_CASES[case] | {"vocab_size": vocab})
    raw = safetensors.load_file(folder / "model.safetensors")
    prefix = "" if case == "llama31_tied" else "transformer."
    raw = {n if n.startswith(prefix) else prefix + n: t.float() for n, t in raw.items()}
    tokens = torch.from_numpy(np.load(folder / "expected_input_ids.npy"))
    batch = MicroBatch(tokens, tokens)
    outcome = run_rank(0, 1, config, family.canonical(raw, config), batch, {})
    expected = torch.from_numpy(np.load(folder / "expected_logits.npy"))
    assert (outcome.logits - expected).abs().max() < LOGITS_TOLERANCE
