"""Both token orders are inverses of each other's maps, and cost no copies where they say so."""

from __future__ import annotations

import pytest
import torch

from megads.models.tokens import TokenGrid

SEQ, BATCH, WIDTH = 6, 3, 5


@pytest.mark.parametrize("batch_first", [False, True])
class TestTokenGrid:
    def test_round_trip(self, batch_first: bool) -> None:
        grid = TokenGrid(SEQ, BATCH, batch_first)
        x = torch.randn(SEQ, BATCH, WIDTH)
        rows = grid.flatten(x)
        assert torch.equal(grid.unflatten(rows), x)
        assert rows.is_contiguous()

    def test_ids_and_positions_line_up(self, batch_first: bool) -> None:
        grid = TokenGrid(SEQ, BATCH, batch_first)
        ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
        flat = grid.flatten_ids(ids)
        assert torch.equal(grid.unflatten(flat[:, None])[..., 0], ids.t())
        table = torch.arange(SEQ)[:, None].float()
        assert torch.equal(grid.repeat(table)[:, 0], flat % SEQ)
        added = grid.add_positions(torch.zeros(BATCH * SEQ, 1), table)
        assert torch.equal(added[:, 0], flat.float() % SEQ)

    def test_unflatten_is_a_view(self, batch_first: bool) -> None:
        x = torch.randn(SEQ * BATCH, WIDTH)
        grid = TokenGrid(SEQ, BATCH, batch_first)
        assert grid.unflatten(x).data_ptr() == x.data_ptr()
        assert grid.flatten(grid.unflatten(x)).data_ptr() == x.data_ptr()


def test_a_run_of_positions() -> None:
    """Under sequence parallelism a rank's rows are whole positions."""
    x = torch.randn(SEQ // 2 * BATCH, WIDTH)
    assert TokenGrid(SEQ, BATCH, batch_first=False).unflatten(x).shape == (SEQ // 2, BATCH, WIDTH)
