"""Loggers that cannot work are refused before anything starts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megads.config import loggers
from megads.config.compose import compose
from megads.config.loggers import logger_problems
from megads.extras import is_installed


def problems(*words: str) -> list[str]:
    return list(logger_problems(compose(list(words)), 4))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["logging.loggers=tensorboard"],
        [
            "logging.loggers=[wandb,tensorboard]",
            "logging.wandb_name=n",
            "logging.wandb_mode=online",
        ],
    ],
)
def test_what_works(words: list[str]) -> None:
    assert problems(*words) == []


def test_a_logger_that_does_not_exist() -> None:
    (text,) = problems("logging.loggers=[wandb,tensorbord]")
    assert text.startswith("logging.loggers=tensorbord: there is no such logger, only wandb and")
    assert text.endswith("did you mean tensorboard?")


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "is_installed", lambda name: name != package)
    assert problems("logging.loggers=[wandb,tensorboard]") == [
        f"logging.loggers={package} needs the package {package}: pip install 'megads[logging]'"
    ]


def test_a_folder_of_the_name_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb itself makes a folder `wandb` where it is used."""
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("a_folder").__file__ is None
    monkeypatch.delitem(sys.modules, "a_folder")
    assert not is_installed("a_folder") and not is_installed("no_such_package")
    assert is_installed("a_module")


@pytest.mark.parametrize(
    "word",
    ["wandb_project=p", "wandb_entity=e", "wandb_name=n", "wandb_mode=offline"],
)
def test_settings_of_wandb_without_it(word: str) -> None:
    words = [f"logging.{word}", "logging.loggers=tensorboard"]
    assert problems(*words) == [f"logging.{word} is only read with logging.loggers=wandb"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["profile_steps=[5,100]", "profile_ranks=[0,3]"], None),
        (["profile_ranks=[0]"], "profile_ranks=[0] is only read with logging.profile_steps"),
        (["profile_steps=[5,101]"], "profile_steps=[101]: the run ends at train.steps=100"),
        (["profile_steps=[5]", "profile_ranks=[3,4]"], "profile_ranks=[4]: the last rank is 3"),
    ],
)
def test_a_profile_that_is_never_made(words: list[str], problem: str | None) -> None:
    found = problems("train.steps=100", *(f"logging.{word}" for word in words))
    assert found == ([] if problem is None else [f"logging.{problem}"])
