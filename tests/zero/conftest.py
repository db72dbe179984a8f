"""Fixtures of the tests of ZeRO."""

from __future__ import annotations

import pytest

from tests.zero.reducing import Log


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """No process talks to another one: see `tests.zero.reducing`."""
    return Log(monkeypatch)
