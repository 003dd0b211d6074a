"""Which part of a checkpoint tensor a rank of the engine has of it, and how long a plan holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from r3.engine.direct_weights import (
    DirectWeights,
    Piece,
    _state,
    _Target,
    part_of_rank,
    pieces_of,
)
from r3.models.families import DeltaSizes
from r3.models.shape import ModelShape
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


class Toy(nn.Module):
    """A model of two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.RMSNorm(4, dtype=torch.bfloat16) for _ in range(2)])


def planned(model: Toy) -> DirectWeights:
    """A plan that fills both norms, after its first load."""
    plan = DirectWeights(
        matrices={}, shape=ModelShape.read(tiny_config().model.path), rank=0, ranks=1
    )
    for i, module in enumerate(model.layers):
        like: Any = module.weight
        name = f"layers.{i}.weight"
        target = _Target(
            name=name, module=module, leaf="weight", like=like, is_dropped=False, pieces=1
        )
        plan.targets.append(target)
        plan.places[name] = [(target, Piece(parameter=name, start=0, rows=4))]
    plan.state = _state(model)
    assert load(plan, model, 1.0) == set()
    return plan


def load(plan: DirectWeights, model: Toy, value: float) -> set[str]:
    with torch.no_grad():
        return plan.load([(name, torch.full((4,), value)) for name in plan.places])


def test_a_plan_serves_every_load_of_a_model_that_stays() -> None:
    model = Toy()
    plan = planned(model)
    for value in (2.0, 3.0):
        assert plan.fits(model)
        assert load(plan, model, value) == set()
        assert all(bool((each == value).all()) for each in model.parameters())


def replaced(model: Toy) -> None:
    model.layers[1].weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))


def moved(model: Toy) -> None:
    model.layers[1].weight.data = model.layers[1].weight.data.clone()


def rebuilt(model: Toy) -> None:
    model.layers[1] = nn.RMSNorm(4, dtype=torch.bfloat16)


def another_type(model: Toy) -> None:
    model.layers[1].weight.data = model.layers[1].weight.data.float()


def added(model: Toy) -> None:
    model.layers.append(nn.RMSNorm(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("change", [replaced, moved, rebuilt, another_type, added])
def test_a_plan_does_not_outlive_the_parameters_it_was_made_for(
    change: Callable[[Toy], None],
) -> None:
    model = Toy()
    plan = planned(model)
    change(model)
    assert not plan.fits(model)


def test_a_plan_that_does_not_fit_would_miss_a_parameter_silently() -> None:
    model = Toy()
    plan = planned(model)
    replaced(model)
    assert load(plan, model, 5.0) == set()
    assert not model.layers[1].weight.any()


def test_an_unfinished_load_ends_a_plan() -> None:
    model = Toy()
    plan = planned(model)
    assert plan.load([]) == {"layers.0.weight", "layers.1.weight"}
    assert not plan.fits(model)
    assert load(plan, model, 2.0) == set()
    assert plan.fits(model)
