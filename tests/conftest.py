"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed import Workers


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
