"""Which part of a checkpoint tensor a rank of the engine has of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from r3.engine.direct_weights import Piece, Target, WeightMismatch, part_of_rank, pieces_of
from r3.models.shape import ModelShape
from r3.models.sizes import DeltaSizes
from tests.tiny import tiny_config

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


@pytest.mark.parametrize(
    "size", [(2, 4), (10, 1), (10, 3), (4, 10), (10, 1, 4)], ids=lambda size: str(list(size))
)
def test_a_place_of_another_layout_is_refused_by_name(size: tuple[int, ...]) -> None:
    """Of ten rows of four on two ranks; [10, 1] would take a broadcast of a column."""
    target = Target(
        name="model.layers.1.norm.weight",
        module=nn.Module(),
        leaf="weight",
        like=torch.empty(size),
        is_packed=False,
    )
    piece = Piece(parameter=target.name, start=0, rows=size[0])
    with pytest.raises(WeightMismatch, match=r"nothing was loaded.*model\.layers\.1\.norm\.weight"):
        target.refuse_unfit("norm.weight", FULL.shape, piece, 2)
    fits = replace(target, like=torch.empty(5, 4))
    fits.refuse_unfit("norm.weight", FULL.shape, replace(piece, rows=5), 2)


@pytest.mark.parametrize("interleaved", [True, False])
def test_parts_of_a_gated_delta_layer_are_divided_one_by_one(interleaved: bool) -> None:
    sizes = DeltaSizes(
        key_heads=2, value_heads=4, key_size=3, value_size=5, taps=4, interleaved=interleaved
    )
    shape = replace(ModelShape.read(tiny_config().model.path), delta=sizes)
    mixed = torch.arange(32.0)[:, None]  # q and k of 6 rows, v of 20
    z, ba = 100 + torch.arange(20.0)[:, None], 200 + torch.arange(4.0)[:, None]
    full = {"in_proj_qkv": mixed, "in_proj_z": z, "in_proj_b": ba, "in_proj_a": ba + 4}
    full |= {"conv1d": mixed}
    rows = {"conv1d": 16, "in_proj_qkvz": 26, "in_proj_ba": 4}
    for rank in range(2):
        expected = [part.chunk(2)[rank] for part in (*mixed.split([6, 6, 20]), z)]
        whole = {
            "conv1d": torch.cat(expected[:3]),
            "in_proj_qkvz": torch.cat(expected),
            "in_proj_ba": torch.cat([part.chunk(2)[rank] for part in (ba, ba + 4)]),
        }
        for layer in ("conv1d",) if interleaved else whole:
            found = torch.full((rows[layer], 1), -1.0)
            name = f"model.layers.0.linear_attn.{layer}.weight"
            for source, piece in pieces_of(name, rows[layer], nn.Module(), shape):
                own = found.narrow(0, piece.start, piece.rows)
                part = full[source.split(".")[-2]][piece.first : piece.end]
                own.copy_(part_of_rank(part, own.shape, rank, 2))
            assert torch.equal(found, whole[layer])
