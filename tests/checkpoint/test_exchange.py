"""Work that all ranks do together."""

from __future__ import annotations

from typing import Any

import pytest

from megads.checkpoint import exchange
from megads.errors import CheckpointError
from megads.parallel.mesh import Axis


def test_a_job_may_start_again_when_the_others_are_gone_but_not_after_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*args: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    def full() -> None:
        raise OSError("no space left")

    with pytest.raises(CheckpointError, match="saving: OSError: no space left") as own:
        exchange.together(Axis("world"), "saving", full)
    assert not own.value.may_pass
    monkeypatch.setattr(exchange, "all_gather_object", unreachable)
    with pytest.raises(CheckpointError, match="cannot be reached: connection closed") as lost:
        exchange.together(Axis("world"), "saving", lambda: None)
    assert lost.value.may_pass
