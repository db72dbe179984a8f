"""Names that transformers gives precedence to, and files that are carried along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.convert.formats import open_source
from tests.convert.hf_models import InMemory, converted
from tests.convert.test_hf_config import BLOOM_FILE, read
from tests.convert.test_hf_write import BLOOM, model_of
from tests.models.stages import random_weights


@pytest.mark.parametrize(
    "said",
    [{"n_embed": 24, "hidden_size": 64}, {"n_embed": None, "hidden_size": 24}, {"n_embed": 24}],
)
def test_blooms_two_names_of_the_hidden_size(said: dict[str, int | None]) -> None:
    """transformers takes `n_embed` where it is not null, and so do we."""
    from transformers import BloomConfig

    rest = {key: value for key, value in BLOOM_FILE.items() if key != "n_embed"}
    assert BloomConfig(**said).hidden_size == 24
    assert read(rest, **said).hidden_size == 24


def test_tokenizers_come_along(tmp_path: Path) -> None:
    model = model_of(BLOOM)
    path = converted(InMemory(model, random_weights(model)), tmp_path / "one", "hf")
    (path / "tekken.json").write_text(json.dumps({"config": {}}))
    again = open_source(path)
    assert (
        converted(again, tmp_path / "two", "hf") / "tekken.json"
    ).read_text() == '{"config": {}}'
