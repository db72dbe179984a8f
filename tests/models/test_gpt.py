"""Stages: pieces of a model make the whole; dropout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.config.model import ModelConfig
from megads.models.families import param_specs
from megads.parallel.mesh import Mesh
from tests.distributed import Workers
from tests.models.stages import (
    Chunk,
    assemble_gradients,
    assert_gradients_close,
    make_stage,
    random_batch,
    random_weights,
    run_rank,
    whole,
    with_dropout,
)

BASE = {
    "num_layers": 5,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "ffn_hidden_size": 44,
    "vocab_size": 101,
    "vocab_multiple": 8,
    "max_seq_length": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "qk_norm": True,
        "qkv_bias": False,
        "tie_embeddings": False,
    },
    "bloom": {"position": "alibi", "embedding_norm": True},
    "neox": {"position": "rope", "rope_fraction": 0.4, "parallel_residual": True},
}
SEQ = 12


def config_of(variant: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(BASE | VARIANTS[variant] | changes)


ALL = pytest.mark.parametrize("variant", VARIANTS)


@ALL
def test_parameters_are_the_specs_in_model_order(variant: str) -> None:
    config = config_of(variant)
    stage = make_stage(config, random_weights(config), Mesh.single())
    assert [n for n, _ in stage.named_parameters()] == [s.name for s in param_specs(config)]
    assert {n: s.name for n, s in stage.specs.items()} == {n: n for n in stage.specs}
    for name, param in stage.named_parameters():
        assert param.shape == stage.specs[name].local_shape(1)


def test_built_on_meta_by_default() -> None:
    from megads.config.schema import KernelsConfig
    from megads.kernels.api import select_kernels
    from megads.models.gpt import GPTStage

    config = config_of("gpt")
    kernels, _ = select_kernels(KernelsConfig(), "cpu", torch.float32)
    options: dict[str, Any] = {"sequence_parallel": False, "recompute": "none"}
    stage = GPTStage(config, whole(config), Mesh.single(), kernels, dtype=torch.bfloat16, **options)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in stage.parameters())
    assert not list(stage.buffers())


@ALL
@pytest.mark.parametrize("cuts", [[2], [0, 5], [1, 3, 3]])
def test_chunks_make_the_whole(variant: str, cuts: list[int]) -> None:
    """Forward and backward through chunks by hand, the tied head on another stage included."""
    config = config_of(variant)
    weights, batch = random_weights(config), random_batch(config, batch=3, seq=SEQ)
    bounds = [0, *cuts, config.num_layers]
    stages = [
        make_stage(
            config,
            weights,
            Mesh.single(),
            chunk=Chunk(range(a, b), has_embedding=i == 0, has_head=i == len(cuts)),
        )
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    layers = [n for stage in stages for n in stage.specs if n.endswith("attn.qkv.weight")]
    assert layers == [f"blocks.{i}.attn.qkv.weight" for i in range(5)]
    boundaries: list[tuple[Tensor, Tensor]] = []
    hidden: Tensor | None = None
    for stage in stages:
        entered = None if hidden is None else hidden.detach().requires_grad_()
        if hidden is not None and entered is not None:
            assert hidden.shape == (SEQ * 3, 24) and hidden.is_contiguous()
            boundaries.append((hidden, entered))
        hidden = stage(entered, batch)
    assert hidden is not None
    loss = hidden
    loss.backward()
    for left, entered in reversed(boundaries):
        left.backward(entered.grad)
    grads: dict[str, Tensor] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            assert param.grad is not None
            key = stage.specs[name].name
            grads[key] = grads[key] + param.grad if key in grads else param.grad
    expected = run_rank(0, 1, config, weights, batch, {})
    torch.testing.assert_close(loss.detach(), expected.loss)
    assert_gradients_close(grads, expected.grads)


def test_dropout_differs_by_microbatch_and_is_off_in_eval() -> None:
    config = config_of("gpt", hidden_dropout=0.3, attention_dropout=0.3)
    weights, batch = random_weights(config), random_batch(config, batch=2, seq=SEQ)
    stage = make_stage(config, weights, Mesh.single())
    losses = []
    for position in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0)):
        stage.dropout_rng.seed(*position)
        losses.append(stage(None, batch).item())
    assert len(set(losses)) == 4 and losses[0] == losses[4]
    plain = make_stage(config_of("gpt"), weights, Mesh.single())
    assert stage.eval()(None, batch).item() == plain(None, batch).item()


def test_replicated_dropout_is_the_same_on_ranks(workers: Workers) -> None:
    """Hidden dropout without sequence parallelism: tp ranks go on with equal activations, so their
    losses agree to the bit and replicated parameters get equal gradients."""
    config = config_of("gpt", hidden_dropout=0.5)
    batches = [random_batch(config, batch=2, seq=SEQ)]
    weights = random_weights(config)
    two = workers(2).run(with_dropout, config, weights, batches, {})
    (one,) = [with_dropout(0, 1, config, weights, batches, {})]
    torch.testing.assert_close(two[0][0][0], one[0][0], rtol=1e-5, atol=0)
    assert torch.equal(two[0][0][0], two[1][0][0])
    assert torch.equal(two[0][1]["final_norm.weight"], two[1][1]["final_norm.weight"])


@ALL
@pytest.mark.parametrize(("tp", "sp"), [(2, True), (4, False), (4, True)])
def test_tensor_parallel_equals_one_process(
    workers: Workers, variant: str, tp: int, sp: bool
) -> None:
    config = config_of(variant)
    weights, batch = random_weights(config), random_batch(config, batch=3, seq=SEQ)
    expected = run_rank(0, 1, config, weights, batch, {})
    options = {"sequence_parallel": sp}
    outcomes = workers(tp).run(run_rank, config, weights, batch, options)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.loss, expected.loss, rtol=1e-5, atol=0)
        assert torch.equal(outcome.loss, outcomes[0].loss)
        assert (outcome.logits - expected.logits).abs().max() < 2e-4
    grads = assemble_gradients(config, outcomes, sequence_parallel=sp)
    whole_grads = assemble_gradients(config, [expected], sequence_parallel=False)
    assert_gradients_close(grads, whole_grads, 5e-5)


@ALL
def test_bf16_follows_fp32(variant: str) -> None:
    config = config_of(variant, num_layers=2)
    weights = {n: w * (1.0 if "norm" in n else 0.5) for n, w in random_weights(config).items()}
    batch = random_batch(config, batch=2, seq=SEQ)
    wide = run_rank(0, 1, config, weights, batch, {})
    narrow = run_rank(0, 1, config, weights, batch, {"dtype": torch.bfloat16})
    assert narrow.logits.dtype == torch.bfloat16 and narrow.loss.dtype == torch.float32
    torch.testing.assert_close(narrow.loss, wide.loss, rtol=2e-2, atol=0)
    for name, grad in wide.grads.items():
        assert narrow.grads[name].dtype == torch.bfloat16
        error = (narrow.grads[name].float() - grad).norm() / grad.norm()
        assert error < 0.1, name


def test_gradients_go_through_sinks() -> None:
    """Where every weight has a sink, only biases, norms and positions are left to autograd."""
    from tests.tensor_parallel.test_layers import RecordingSink

    config = config_of("gpt", num_layers=2)
    weights, batch = random_weights(config), random_batch(config, batch=2, seq=SEQ)
    expected = run_rank(0, 1, config, weights, batch, {}).grads
    stage = make_stage(config, weights, Mesh.single())
    for param in stage.parameters():
        param.grad_sink = RecordingSink(param.shape)  # type: ignore[attr-defined]
    stage(None, batch).backward()
    for name, param in stage.named_parameters():
        sink: Any = param.grad_sink  # type: ignore[attr-defined]
        calls = {"embedding.word.weight": ["add_outer", "add_rows"]}.get(name, ["add_outer"])
        if stage.specs[name].role in ("matrix", "embedding") and "position" not in name:
            assert param.grad is None and sink.calls[1:] == calls
            grad = sink.total
        else:
            assert sink.calls == [""]
            grad = param.grad
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-4)


def test_too_long_a_sequence_is_refused() -> None:
    config = config_of("gpt")
    stage = make_stage(config, random_weights(config), Mesh.single())
    with pytest.raises(ValueError, match="17 positions were given to a model that has 16"):
        stage(None, random_batch(config, batch=1, seq=17))


def test_misuse_is_refused() -> None:
    config = config_of("gpt")
    middle = Chunk(range(1, 2), has_embedding=False, has_head=False)
    stage = make_stage(config, random_weights(config), Mesh.single(), chunk=middle)
    batch = random_batch(config, batch=1, seq=4)
    with pytest.raises(ValueError, match="needs hidden states"):
        stage(None, batch)
    with pytest.raises(ValueError, match="has logits"):
        stage.logits(torch.zeros(4, 24), batch)


def test_nothing_stays_alive_between_steps() -> None:
    """No graph is kept by the stage, its tables or its kernels."""
    import gc

    config = config_of("llama", num_layers=2)
    stage = make_stage(config, random_weights(config), Mesh.single())
    batch = random_batch(config, batch=2, seq=SEQ)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        stage(None, batch).backward()
        counts.append(live())
    assert counts[1] == counts[2]
