"""The package keeps the rules of `tests.architecture`, and the rules notice what breaks them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.architecture import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    PURE,
    TORCH_FREE,
    TORCH_USERS_IN_LAUNCH,
    WAIVER,
    Module,
    communicators,
    cycles,
    environment_readers,
    global_statements,
    made_up,
    overlong,
    package,
    prints,
    torch_loaders,
    wrong_directions,
)

Rule = Callable[[list[Module]], list[str]]
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
BROKEN: list[tuple[Rule, list[Module], str]] = [
    (
        wrong_directions,
        made_up(zero__x="def f():\n    import megads.models.gpt", models__gpt=""),
        "zero.x imports models.gpt",
    ),
    (
        wrong_directions,
        made_up(pipeline__x="from ..zero import y", zero__y=""),
        "pipeline.x imports zero.y",
    ),
    (
        wrong_directions,
        made_up(optim__x="from megads.zero.y import Z", zero__y=""),
        "optim.x imports zero.y",
    ),
    (
        wrong_directions,
        made_up(train__x="from megads.launch import local", launch__local=""),
        "train.x imports launch.local",
    ),
    (
        wrong_directions,
        made_up(optim__lr="from megads.parallel import mesh", parallel__mesh=""),
        "optim.lr imports parallel.mesh",
    ),
    (
        wrong_directions,
        made_up(config__x="from megads.pipeline import partition", pipeline__partition=""),
        "config.x imports pipeline.partition",
    ),
    (
        cycles,
        made_up(a="import megads.b", b="from megads import c", c="from megads.a import x"),
        "a -> b -> c -> a",
    ),
    (global_statements, made_up(a="def f():\n    global x"), "a:2 global"),
    (environment_readers, made_up(a="import os\nos.environ['X']"), "a:2 uses the environment"),
    (environment_readers, made_up(a="from os import getenv"), "a:1 uses the environment"),
    (prints, made_up(train__a="print(1)"), "train.a:1 prints"),
    (communicators, made_up(zero__a="import torch.distributed as d"), "zero.a uses torch.distrib"),
    (communicators, made_up(zero__a="from torch import distributed"), "zero.a uses torch.distrib"),
    (communicators, made_up(zero__a="torch.distributed.barrier()"), "zero.a uses torch.distrib"),
    (overlong, made_up(a="x = 1\n" * (MAX_FILE_LINES + 1)), "a has 301 lines"),
    (overlong, made_up(a=LONG_FUNCTION), "a.f has 61 lines"),
]
FINE: list[tuple[Rule, list[Module]]] = [
    (wrong_directions, made_up(zero__x="from megads.optim import y", optim__y="", cli__z="")),
    (
        wrong_directions,
        made_up(zero__x="from megads.models.families import F", models__families=""),
    ),
    (
        wrong_directions,
        made_up(config__x="import megads.parallel.layout", parallel__layout=""),
    ),
    (cycles, made_up(a="import megads.b\nimport megads.c", b="import megads.c", c="")),
    (environment_readers, made_up(launch__env="import os\nos.environ['X']")),
    (prints, made_up(cli__a="print(1)")),
    (communicators, made_up(parallel__a="import torch.distributed as d")),
    (overlong, made_up(a=f"{WAIVER}a table\n" + "x = 1\n" * MAX_FILE_LINES)),
    (overlong, made_up(a=LONG_FUNCTION.replace("():", f"():  {WAIVER}a table", 1))),
]
RULES = list(dict.fromkeys(rule for rule, *_ in BROKEN))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(package()) == []


@pytest.mark.parametrize(("rule", "modules", "complaint"), BROKEN)
def test_breaking_a_rule_is_noticed(rule: Rule, modules: list[Module], complaint: str) -> None:
    found = rule(modules)
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize(("rule", "modules"), FINE)
def test_what_is_allowed_is_not_noticed(rule: Rule, modules: list[Module]) -> None:
    assert rule(modules) == []


def test_pure_modules_never_load_torch() -> None:
    names = {module.name for module in package()}
    assert names >= PURE
    free = [
        f"megads.{name}"
        for name in sorted(names - TORCH_USERS_IN_LAUNCH)
        if name in TORCH_FREE or name.partition(".")[0] in TORCH_FREE
    ]
    assert torch_loaders(["megads", *free]) == []


def test_loading_torch_would_be_noticed() -> None:
    assert torch_loaders(["megads.parallel.layout", "megads.parallel.mesh"]) == [
        "megads.parallel.mesh"
    ]
