"""GPT-NeoX in: layouts of its own, held against models of the transformers library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megads.convert.formats import open_source
from megads.convert.run import open_checked
from megads.convert.source import ReadOptions
from megads.errors import CheckpointError
from tests.convert.neox_models import (
    GATED,
    IDS,
    SETTINGS,
    WORDS,
    logits,
    pythia,
    random_weights,
    rank_files,
    write_files,
)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parallel_residual_sums_the_ranks_biases(tmp_path: Path, tp: int) -> None:
    model, files = pythia()
    write_files(tmp_path, [rank_files(files, tp, rank) for rank in range(tp)])
    source = open_checked(tmp_path, "auto", WORDS)
    assert source.format == "gpt-neox" and source.model.parallel_residual
    with torch.no_grad():
        assert (logits(source, tmp_path, IDS) - model(IDS).logits).abs().max() < 1e-4
    bias = source.tensor("param", "blocks.0.attn.out.bias")
    torch.testing.assert_close(bias, files["2.attention.dense.bias"])
    if tp > 1:
        single = rank_files(files, tp, 0)["2.attention.dense.bias"]
        assert not torch.allclose(bias, single)


def test_sequential_residual_takes_one_ranks_bias_and_all_must_agree(tmp_path: Path) -> None:
    model, files = pythia(parallel=False)
    settings = SETTINGS | {"gpt-j-residual": False}
    ranks = [rank_files(files, 2, rank) for rank in (0, 1)]
    rows = ("attention.dense.bias", "linear2.bias")
    agreeing = [
        {name: files[name] if name.endswith(rows) else tensor for name, tensor in rank.items()}
        for rank in ranks
    ]
    write_files(tmp_path / "good", agreeing, settings)
    source = open_checked(tmp_path / "good", "auto", WORDS)
    with torch.no_grad():
        assert (logits(source, tmp_path, IDS) - model(IDS).logits).abs().max() < 1e-4
    write_files(tmp_path / "bad", ranks, settings)
    with pytest.raises(
        CheckpointError, match=r"attention\.dense\.bias.*layer_02.*layer_02-model_01"
    ):
        open_source(tmp_path / "bad").tensor("param", "blocks.0.attn.out.bias")


def test_norms_that_drifted_apart_are_averaged(tmp_path: Path) -> None:
    _, files = pythia()
    ranks = [rank_files(files, 2, rank) for rank in (0, 1)]
    ranks[1]["2.input_layernorm.weight"] = files["2.input_layernorm.weight"] + 0.02
    write_files(tmp_path, ranks)
    source = open_source(tmp_path)
    got = source.tensor("param", "blocks.0.attn_norm.weight")
    torch.testing.assert_close(got, files["2.input_layernorm.weight"] + 0.01)
    assert "blocks.0.attn_norm.weight (input_layernorm.weight of layer 2)" in source.notes[-1]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("names", ["current", "llama"])
def test_gated_with_grouped_heads_is_llama(tmp_path: Path, tp: int, names: str) -> None:
    """The second half is the gate, `[Q | K | V]` on each rank, norms have a scale."""
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    random_weights(model)
    state = model.model.state_dict()
    ranks = []
    for rank in range(tp):

        def mine(name: str, dim: int = 0, rank: int = rank) -> Tensor:
            return state[f"{name}.weight"].chunk(tp, dim)[rank]

        files = {"0.word_embeddings.weight": state["embed_tokens.weight"]}
        files["6.final_linear.weight"] = model.lm_head.weight.data
        for name in list(files):
            padded = torch.cat([files[name], torch.full((-101 % (8 * tp), 32), 50.0)])
            files[name] = padded.chunk(tp)[rank]
        files["5.norm.scale"] = state["norm.weight"]
        for layer in (0, 1):
            theirs, ours = f"layers.{layer}", layer + 2
            for which in ("input_layernorm", "post_attention_layernorm"):
                files[f"{ours}.{which}.scale"] = state[f"{theirs}.{which}.weight"]
            qkv = [mine(f"{theirs}.self_attn.{which}_proj") for which in "qkv"]
            files[f"{ours}.attention.query_key_value.weight"] = torch.cat(qkv)
            files[f"{ours}.attention.dense.weight"] = mine(f"{theirs}.self_attn.o_proj", 1)
            gate, up = (mine(f"{theirs}.mlp.{which}_proj") for which in ("gate", "up"))
            down = mine(f"{theirs}.mlp.down_proj", 1)
            if names == "current":
                files[f"{ours}.mlp.linear1.weight"] = torch.cat([up, gate])
                files[f"{ours}.mlp.linear2.weight"] = down
            else:
                files[f"{ours}.mlp.w1.weight"], files[f"{ours}.mlp.w3.weight"] = gate, up
                files[f"{ours}.mlp.w2.weight"] = down
        ranks.append(files)
    settings = GATED if names == "current" else GATED | {"mlp_type": "llama"}
    write_files(tmp_path, ranks, settings)
    source = open_checked(tmp_path, "auto", WORDS)
    assert source.model.ffn_hidden_size == 48 and source.model.num_kv_heads == 2
    with torch.no_grad():
        expected = model(IDS).logits
        assert (logits(source, tmp_path, IDS) - expected).abs().max() < 1e-4
        gelu = source.model.model_copy(update={"activation": "geglu"})
        source.model = gelu
        (tmp_path / "out").rename(tmp_path / "first")
        assert (logits(source, tmp_path, IDS) - expected).abs().max() > 0.01
    with pytest.raises(CheckpointError, match=r"num_kv_heads=2 of 4"):
        open_source(tmp_path, options=ReadOptions(qkv="grouped"))


def test_layers_in_a_row_in_the_ranks_files(tmp_path: Path) -> None:
    """As it is without the pipeline engine."""
    model, files = pythia()
    step = write_files(tmp_path, [rank_files(files, 2, rank) for rank in (0, 1)])
    for rank in (0, 1):
        module = {f"sequential.{name}": t for name, t in rank_files(files, 2, rank).items()}
        torch.save({"module": module, "iteration": 4}, step / f"mp_rank_{rank:02d}_model_states.pt")
    for path in step.glob("layer_*"):
        path.unlink()
    source = open_checked(tmp_path, "auto", WORDS)
    with torch.no_grad():
        assert (logits(source, tmp_path, IDS) - model(IDS).logits).abs().max() < 1e-4
