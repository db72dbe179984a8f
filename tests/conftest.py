"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are for any machine: four processes on the CPU

import pytest
import torch

from tests.distributed import Workers

LONG = ("launch", "parity", "train", "cli", "report", "kernels", "pipeline")
"""Folders with files that take long, which are run first: of workers that take one file after the
other, none is left with a long one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models here are tiny, and worker processes want the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """`workers(n)`: a pool of n processes in one gloo group; see `tests.distributed`."""
    pools = Workers()
    yield pools
    pools.close()
