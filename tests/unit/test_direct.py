"""Which part of a checkpoint tensor a rank of the engine has of it, and how long a plan holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from r3.engine.direct import DirectWeights, Piece, _state, _Target, part_of_rank
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
