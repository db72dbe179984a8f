"""What the tests of whole runs rest on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.config.compose import compose
from tests.training import FAMILIES, command_words, tiny_config

EVERYTHING = ["parallel=tp2pp2", "precision=fp16", "kernels=reference", "data.paths=[a,b]"]
EVERYTHING += ["data.weights=[0.25,0.75]", "train.batch_rampup=[4,4,24]", "optim.eps=1e-4"]
EVERYTHING += ["optim.total=null", "checkpoint.load=/a/b", "model.qkv_bias=false"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overrides", [[], EVERYTHING], ids=["none", "everything"])
def test_the_quick_way_to_a_configuration_gives_what_the_command_would_run(
    family: str, overrides: list[str]
) -> None:
    words = Path("/some/run"), "/some/data", family, *overrides
    assert tiny_config(*words) == compose(command_words(*words))


def test_a_setting_that_does_not_exist_is_no_setting() -> None:
    with pytest.raises(AssertionError, match=r"optim\.learning_rate=1"):
        tiny_config(Path("run"), "data", "gpt", "optim.learning_rate=1")
