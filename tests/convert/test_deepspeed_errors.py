"""Checkpoints of Megatron-DeepSpeed with something wrong: named, and never read as if right."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megads.convert.formats import open_source
from megads.convert.pickles import load_pickle
from megads.convert.run import open_checked
from megads.convert.source import ReadOptions
from megads.errors import CheckpointError
from tests.convert.deepspeed_cases import BIGSCIENCE, Layout
from tests.convert.deepspeed_models import BLOOM, written


def test_copies_that_differ_are_an_error_that_names_both_files(tmp_path: Path) -> None:
    """Failure 21."""
    step = written(tmp_path / "norms", BIGSCIENCE, BLOOM, Layout(2, optimizer=False))
    path = step / "layer_04-model_01-model_states.pt"
    content = torch.load(path)
    content["input_layernorm.weight"][3] += 5.0
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"layer_04-model_00.*layer_04-model_01.*by 5,"):
        open_source(tmp_path / "norms")

    step = written(tmp_path / "tied", BIGSCIENCE, BLOOM, Layout(1, 2, tied_on_last=True))
    path = step / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    state = load_pickle(path)["optimizer_state_dict"]
    table = state["param_slice_mappings"][0]
    at = table["tied_modules.embed.word_embeddings.weight"].start
    _poke(path, state["base_optimizer_state"]["state"][0]["exp_avg"], at + 5)
    source = open_source(tmp_path / "tied")
    source.tensor("param", "embedding.word.weight")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_.* and .*mp_rank_01_.*exp_avg\) differ"):
        source.tensor("exp_avg", "embedding.word.weight")


def _poke(path: Path, tensor: Tensor, index: int) -> None:
    """Change one element of a tensor of a file, found in it by its bytes."""
    data = bytearray(path.read_bytes())
    at = data.index(tensor[index - 2 : index + 3].numpy().tobytes()) + 8
    data[at : at + 4] = (-tensor[index : index + 1]).numpy().tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name, value",
    [
        ("apply_residual_connection_post_layernorm", True),
        ("squared_relu", True),
        ("apply_layernorm_1p", True),
        ("glu_activation", "reglu"),
        ("num_experts", [4]),
        ("position_embedding_type", 9),
    ],
)
def test_settings_without_a_place_are_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    written(tmp_path / "odd", BIGSCIENCE, BLOOM | {name: value}, Layout(optimizer=False))
    with pytest.raises(CheckpointError, match=name):
        open_source(tmp_path / "odd")


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return written(tmp_path / name, BIGSCIENCE, BLOOM, Layout(2, 2, 2))

    (fresh("a") / "layer_05-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="layer 05 of tensor-parallel rank 01 is missing"):
        open_source(tmp_path / "a")
    step = fresh("b")
    for path in step.glob("layer_05-*"):
        path.unlink()
    with pytest.raises(
        CheckpointError, match=r"5 blocks, there are those of layers \[3, 4, 6, 7\]"
    ):
        open_source(tmp_path / "b")
    (fresh("c") / "zero_pp_rank_1_mp_rank_02_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="data-parallel rank 1 and model-parallel rank 02"):
        open_source(tmp_path / "c")
    path = fresh("d") / "layer_04-model_00-model_states.pt"
    for rank in (0, 1):
        path = path.with_name(f"layer_04-model_0{rank}-model_states.pt")
        torch.save(torch.load(path) | {"mlp.extra.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"no place for: layer_04-model_00.*mlp\.extra\.weig"):
        open_checked(tmp_path / "d", "megatron-deepspeed", ReadOptions())
    step = fresh("e")
    for path in step.glob("zero_pp_rank_1_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"of the \d+ elements of|do not hold 3.mlp"):
        open_checked(tmp_path / "e", "auto", ReadOptions())


def test_the_latest_step_and_others(tmp_path: Path) -> None:
    step = written(tmp_path / "run", BIGSCIENCE, BLOOM, Layout(optimizer=False))
    for number in (9, 10, 10000):
        (tmp_path / "run" / f"global_step{number}").symlink_to(step)
    (tmp_path / "run" / "global_stepx").mkdir()
    assert open_source(tmp_path / "run").path.name == "global_step4"
    found = open_source(tmp_path / "run", options=ReadOptions(step=9))
    assert found.path.name == "global_step9"
    assert open_source(step).path == step
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; it has: 4, 9, 10, 10000"):
        open_source(tmp_path / "run", "megatron-deepspeed", ReadOptions(step=5))
    (tmp_path / "run" / "latest").unlink()
    assert open_source(tmp_path / "run").path.name == "global_step10000"
    for name in ("global_step77", "../run/global_step4"):
        (tmp_path / "run" / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="where there is no checkpoint"):
            open_source(tmp_path / "run", "megatron-deepspeed")


def test_addresses_out_of_bounds_and_wrong_kinds_of_content(tmp_path: Path) -> None:
    step = written(tmp_path / "bad", BIGSCIENCE, BLOOM, Layout())
    path = step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="not a table of names"):
        open_source(tmp_path / "bad")
    flat = [torch.zeros(8)]
    for table in ({"3.x": 5}, {"somewhere.x": 5}):
        state = {"single_partition_of_fp32_groups": flat, "param_slice_mappings": [table]}
        torch.save({"optimizer_state_dict": state}, path)
        with pytest.raises(CheckpointError, match="damaged"):
            open_source(tmp_path / "bad")
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError):
        open_source(tmp_path / "bad")
