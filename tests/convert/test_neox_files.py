"""GPT-NeoX in: the optimizer's files, and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.convert.formats import open_source
from megads.convert.neox.config import model_config
from megads.convert.pickles import load_pickle
from megads.convert.run import open_checked
from megads.convert.source import Source
from megads.errors import CheckpointError
from megads.models.families import param_specs
from tests.convert.deepspeed_cases import (
    KINDS,
    NEOX,
    PYTHIA,
    Dialect,
    Layout,
    canonical,
    stamped,
    write_checkpoint,
)
from tests.convert.neox_models import GATED, SETTINGS, WORDS, pythia, write_files


def test_halves_the_other_way_round_are_other_tensors(tmp_path: Path) -> None:
    """A file in Megatron's order, gate first, does not give what GPT-NeoX's gives."""
    settings = GATED | {"num_kv_heads": 4}
    results = []
    for name, gate_first in (("neox", False), ("megatron", True)):
        dialect = replace(PYTHIA, scale="scale", gate_first=gate_first)
        source = stamped_source(tmp_path / name, dialect, settings, Layout(2))
        results.append(source.tensor("exp_avg", "blocks.1.mlp.up.weight"))
    want = stamped(source.model, "exp_avg")["blocks.1.mlp.up.weight"]
    assert torch.equal(results[0], want) and not torch.equal(results[1], want)


def stamped_source(
    folder: Path, dialect: Dialect, settings: Mapping[str, Any], layout: Layout
) -> Source:
    """A checkpoint with the optimizer's files in which every element is known."""
    plain = {key.replace("-", "_"): value for key, value in settings.items()}
    model = model_config(plain, ffn_hidden_size=48, vocab_size=101, path=folder)
    states = {"iteration": 4, "args": {"hidden_size": 32}, "global_samples": 32}
    step = write_checkpoint(folder, dialect, model, layout, states)
    (step / "configs").mkdir()
    (step / "configs" / "a.yml").write_text(json.dumps(settings))
    return open_checked(folder, "auto", WORDS)


OLD = replace(PYTHIA, names=NEOX | {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"})


@pytest.mark.parametrize("dialect", [PYTHIA, OLD], ids=["linear1", "dense_h_to_4h"])
@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (2, 2, 3)])
def test_masters_and_moments_at_any_cut(
    tmp_path: Path, dialect: Dialect, tp: int, pp: int, dp: int
) -> None:
    """With parallel residual the masters of a row's bias add up; its moments are any rank's."""
    source = stamped_source(tmp_path, dialect, SETTINGS, Layout(tp, pp, dp, vocab_multiple=8))
    assert source.kinds == KINDS and source.trained.samples == 32
    for kind in KINDS:
        want, got = stamped(source.model, kind), canonical(source, kind)
        for spec in param_specs(source.model):
            summed = kind == "param" and spec.name.endswith((".out.bias", ".down.bias"))
            times = tp if summed else 1
            torch.testing.assert_close(got[spec.name], want[spec.name] * times, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, value",
    [
        ("norm", "scalenorm"),
        ("pos-emb", "rpe"),
        ("activation", "mish"),
        ("gpt-j-tied", True),
        ("use_qk_layernorm", True),
        ("moe_num_experts", 4),
        ("num-unique-layers", 1),
        ("sliding_window_width", 4),
        ("soft-prompt-tuning", {"enabled": True}),
        ("attention-config", [[["global", "local"], 1]]),
        ("use_bias_in_mlp", False),
    ],
)
def test_settings_without_a_place_are_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    _, files = pythia()
    write_files(tmp_path, [files], SETTINGS | {name: value})
    # The last one makes GPT-NeoX leave the attention out.
    wanted = name.replace("-", "_") if name != "use_bias_in_mlp" else "leaves the attention out"
    with pytest.raises(CheckpointError, match=wanted):
        open_source(tmp_path)


def test_settings_that_are_missing_or_contradict(tmp_path: Path) -> None:
    _, files = pythia()
    step = write_files(tmp_path, [files])
    (step / "configs" / "other.yml").write_text("rotary_pct: 0.25\n")
    with pytest.raises(
        CheckpointError, match=r"other.yml: rotary_pct is 0.25, elsewhere it is 0.5"
    ):
        open_source(tmp_path)
    for path in (step / "configs").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no configs/\*\.yml"):
        open_source(tmp_path)
    (tmp_path / "config.yml").write_text(json.dumps(SETTINGS | {"num-layers": 3}))
    with pytest.raises(CheckpointError, match="num_layers is 2, elsewhere it is 3"):
        open_source(tmp_path)
    (tmp_path / "config.yml").write_text(json.dumps(SETTINGS))
    assert open_source(tmp_path).model.num_layers == 2
    assert load_pickle(step / "layer_05-model_00-model_states.pt").keys() == {
        "norm.weight",
        "norm.bias",
    }
