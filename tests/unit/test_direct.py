"""Which part of a checkpoint tensor a rank of the engine has of it."""

from __future__ import annotations

import pytest
import torch

from r3.engine.direct import part_of_rank

pytestmark = pytest.mark.unit

FULL = torch.arange(40.0).view(10, 4)


@pytest.mark.parametrize("rank", range(2))
def test_rows_or_columns_are_divided_over_ranks(rank: int) -> None:
    rows = part_of_rank(FULL, (5, 4), rank, 2)
    columns = part_of_rank(FULL, (10, 2), rank, 2)
    assert torch.equal(rows, FULL.chunk(2)[rank])
    assert torch.equal(columns, FULL.chunk(2, 1)[rank])
    assert torch.equal(part_of_rank(FULL, (10, 4), rank, 2), FULL)


def test_a_key_head_is_held_by_several_ranks() -> None:
    # Two heads of five rows on four ranks.
    parts = [part_of_rank(FULL, (5, 4), rank, 4) for rank in range(4)]
    first, second = FULL.chunk(2)
    for part, expected in zip(parts, (first, first, second, second), strict=True):
        assert torch.equal(part, expected)


def test_a_padded_vocabulary_ends_with_the_last_token() -> None:
    assert torch.equal(part_of_rank(FULL, (6, 4), 1, 2), FULL[6:])
    assert torch.equal(part_of_rank(FULL, (16, 4), 0, 1), FULL)
