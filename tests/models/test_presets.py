"""The presets against the sizes that were published."""

import functools

import pytest

from megads.config.compose import compose
from megads.config.files import config_dir
from megads.config.model import ModelConfig
from megads.models.families import param_count

# Exact counts. BLOOM: "Model details" of the model cards bigscience/<name>. LLaMA, Mistral, Qwen:
# number of parameters of the safetensors files on the Hugging Face hub (meta-llama/*,
# huggyllama/llama-7b, -13b, -65b, mistralai/Mistral-7B-v0.1, Qwen/Qwen2-7B, Qwen/Qwen3-8B).
# Pythia: Biderman et al. 2023 (arXiv 2304.01373) and the model card. GPT-NeoX-20B: its model card.
EXACT = {
    "bloom-560m": 559_214_592,
    "bloom-1b7": 1_722_408_960,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "pythia-1.4b": 1_414_647_808,
    "neox-20b": 20_554_567_680,
}

# OPT (Zhang et al. 2022, arXiv 2205.01068) has the shapes of GPT-3 with a vocabulary of 50272 and
# 2050 positions; these are the parameters of facebook/opt-* on the hub.
OPT = {
    "gpt-125m": 125_239_296,
    "gpt-1.3b": 1_315_758_080,
    "gpt-2.7b": 2_651_596_800,
    "gpt-6.7b": 6_658_473_984,
    "gpt-13b": 12_853_473_280,
}

# Billions, as printed. Up to 13B: table 2.1 of Brown et al. 2020 (arXiv 2005.14165), where 350M is
# a round number and 13B has a hidden size of 5140 in place of 5120. Above: tables 1 and 2 of
# Narayanan et al. 2021 (arXiv 2104.04473).
PRINTED = {
    "gpt-125m": (0.125, 0.0005),
    "gpt-350m": (0.350, 0.006),
    "gpt-760m": (0.760, 0.0005),
    "gpt-1.3b": (1.3, 0.05),
    "gpt-2.7b": (2.7, 0.05),
    "gpt-6.7b": (6.7, 0.05),
    "gpt-13b": (13.0, 0.15),
    "gpt-175b": (174.6, 0.05),
    "gpt-530b": (529.6, 0.05),
    "gpt-1t": (1008.0, 0.05),
}

# GPT-2 medium (Radford et al. 2019; openai-community/gpt2-medium) is 350M with 1024 positions.
GPT2_MEDIUM = 354_823_168


@functools.cache
def preset(name: str) -> ModelConfig:
    return compose([f"model={name}", "data=custom"]).model


def test_every_preset_has_a_published_count():
    names = {path.stem for path in (config_dir() / "model").glob("*.yaml")}
    assert names == {"gpt-tiny", *EXACT, *PRINTED}
    assert all(preset(name).name == name for name in names)


@pytest.mark.parametrize("name", EXACT)
def test_exact_count(name):
    assert param_count(preset(name)) == EXACT[name]


@pytest.mark.parametrize("name", PRINTED)
def test_printed_count(name):
    printed, rounding = PRINTED[name]
    assert abs(param_count(preset(name)) / 1e9 - printed) <= rounding


@pytest.mark.parametrize("name", OPT)
def test_shape_against_opt(name):
    model = preset(name).model_copy(update={"vocab_size": 50272, "max_seq_length": 2050})
    assert param_count(model) == OPT[name]


def test_350m_against_gpt2_medium():
    model = preset("gpt-350m").model_copy(update={"max_seq_length": 1024})
    assert param_count(model) == GPT2_MEDIUM


def test_a_wrong_shape_is_seen():
    for change in ({"num_kv_heads": 32}, {"qkv_bias": True}, {"tie_embeddings": True}):
        assert param_count(preset("llama3-8b").model_copy(update=change)) != EXACT["llama3-8b"]


def test_gpt_tiny_reads_bytes():
    tiny = preset("gpt-tiny")
    assert tiny.vocab_size == 257
    assert param_count(tiny) < 1e6


def test_details_that_do_not_show_in_the_count():
    assert preset("llama3-8b").rope_theta == 500_000
    assert preset("qwen3-8b").rope_theta == preset("qwen2-7b").rope_theta == 1_000_000
    assert preset("mistral-7b").attention_window == 4096
    assert preset("bloom-176b").position == "alibi"
    assert preset("neox-20b").rotary_dim == 24  # of 96: its model card
    assert preset("pythia-1.4b").rotary_dim == 32
    assert {preset(n).norm_eps for n in ("llama-7b", "qwen2-7b", "qwen3-8b")} == {1e-6}
    assert {preset(n).norm_eps for n in ("llama2-70b", "llama3-8b", "mistral-7b")} == {1e-5}
