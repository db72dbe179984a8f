"""FLOPs against torch's counter on independent implementations, and the sizes of model state."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megads.config.model import ModelConfig
from megads.models.families import param_count
from megads.models.flops import (
    device_peak_tflops,
    forward_flops,
    recomputed_flops,
    training_flops,
)
from megads.parallel.mesh import Mesh
from tests.models.stages import make_stage, random_batch, random_weights

transformers = pytest.importorskip("transformers")

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 160}
LLAMA = {
    **SIZES,
    "num_kv_heads": 2,
    "ffn_hidden_size": 96,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "qkv_bias": False,
    "attn_out_bias": False,
    "mlp_bias": False,
    "tie_embeddings": False,
}


def hugging_face(family: str, model: ModelConfig) -> torch.nn.Module:
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "attn_implementation": "eager",
    }
    if family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        extra = {"head_dim": model.head_dim} if family != "Qwen2" else {}
        config = getattr(transformers, f"{family}Config")(
            **common,
            **extra,
            num_key_value_heads=model.num_kv_heads,
            intermediate_size=model.ffn_hidden_size,
        )
    elif family == "GPTNeoX":
        config = transformers.GPTNeoXConfig(**common, intermediate_size=model.ffn_hidden_size)
    elif family == "GPT2":
        config = transformers.GPT2Config(**common, n_inner=model.ffn_hidden_size)
    else:
        config = transformers.BloomConfig(**common)
    return getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(
        config
    )


def counted(model: torch.nn.Module, vocab_size: int, batch: int, seq: int) -> int:
    """What torch counts for forward and backward, without the products in the table of angles."""
    tokens = torch.randint(vocab_size, (batch, seq))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    total = counter.get_total_flops()
    rotary = [m for n, m in model.named_modules() if n.endswith("rotary_emb")]
    if rotary:
        positions = torch.arange(seq)[None]
        with FlopCounterMode(display=False) as counter:
            rotary[0](torch.zeros(batch, seq, 1), positions)
        total -= counter.get_total_flops()
    return total


@pytest.mark.parametrize(
    "family, fields",
    [
        ("Llama", LLAMA),
        ("Mistral", {**LLAMA, "num_kv_heads": 1}),
        ("Qwen2", {**LLAMA, "qkv_bias": True}),
        ("Qwen3", {**LLAMA, "head_dim": 24, "qk_norm": True}),
        ("GPT2", {**SIZES, "ffn_hidden_size": 200}),
        ("Bloom", {**SIZES, "position": "alibi", "num_layers": 3}),
        ("GPTNeoX", {**SIZES, "ffn_hidden_size": 120, "parallel_residual": True}),
    ],
)
@pytest.mark.parametrize("batch, seq", [(2, 32), (3, 7)])
def test_training_flops_are_those_torch_counts(family, fields, batch, seq):
    model = ModelConfig(**fields)
    measured = counted(hugging_face(family, model), model.vocab_size, batch, seq)
    assert training_flops(model, batch, seq) == measured


def test_gated_and_grouped_models_are_not_counted_as_plain_ones():
    """One SwiGLU model with grouped KV heads, and the two formulas that people use for it."""
    model = ModelConfig(**LLAMA)
    tokens = 2 * 32
    assert training_flops(model, 2, 32) == 30_670_848
    hidden, layers, vocab = model.hidden_size, model.num_layers, model.vocab_size
    attention = 12 * layers * hidden * 32 * tokens
    four_h = 6 * tokens * (12 * layers * hidden**2 + vocab * hidden) + attention
    assert four_h == 44_826_624
    every_parameter = 6 * param_count(model) * tokens
    assert every_parameter == pytest.approx(31_457_280, rel=0.01) and every_parameter != 30_670_848


def test_parts_add_up_and_grow_as_they_should():
    model = ModelConfig(**LLAMA)
    parts = forward_flops(model, 2, 32)
    assert parts.embedding == 0
    assert 3 * parts.total(model.num_layers) == training_flops(model, 2, 32)
    assert forward_flops(model, 4, 32).block == 2 * parts.block
    assert forward_flops(model, 2, 64).block > 2 * parts.block
    assert forward_flops(model, 2, 64).head == 2 * parts.head


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.0),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-PCIE-32GB", "fp16", 112.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM2e", "bf16", None),
        ("NVIDIA GeForce RTX 9999", "bf16", None),
        ("NVIDIA A1000", "bf16", None),
        ("cpu", "fp32", None),
        ("", "fp32", None),
    ],
)
def test_device_peaks(name, precision, peak):
    assert device_peak_tflops(name, precision) == peak


def fused_forward(query, key, *_args, out_shape=None, **_kwargs):
    """Two products of `[batch, heads, seq, head_dim]` tensors; torch counts them on GPUs only."""
    batch, heads, rows, width = query
    return 2 * (2 * batch * heads * rows * key[2] * width)


def fused_backward(_grad, query, key, *_args, out_shape=None, **_kwargs):
    return 2 * fused_forward(query, key)


ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}


@pytest.mark.parametrize(
    "recompute, layers", [("none", None), ("selective", None), ("full", None), ("full", 1)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_flops_are_those_our_model_does_again(recompute, layers, dropout):
    model = ModelConfig(**LLAMA, vocab_multiple=32, hidden_dropout=dropout)
    stage = make_stage(
        model,
        random_weights(model),
        Mesh.single(),
        recompute=recompute,
        recompute_layers=layers,
        kernels="torch",
    )
    stage.dropout_rng.seed(1, 1, 0)
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        stage(None, random_batch(model, batch=2, seq=32)).backward()
    again = recomputed_flops(model, 2, 32, recompute=recompute, layers=layers, chunks=[2])
    assert counter.get_total_flops() == training_flops(model, 2, 32) + again
    assert (again > 0) == (recompute != "none")


@pytest.mark.parametrize("layers, blocks", [(None, 6), (0, 0), (1, 3), (2, 5), (9, 6)])
def test_layers_are_recomputed_in_each_chunk(layers, blocks):
    model = ModelConfig(**{**LLAMA, "num_layers": 6})
    again = recomputed_flops(model, 2, 32, recompute="full", layers=layers, chunks=[3, 1, 2])
    assert again == blocks * forward_flops(model, 2, 32).block
