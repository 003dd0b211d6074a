"""The order of prompts is a pure function of seed and step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from r3.data.prompts import Dataset, prompts_of_step, turns
from r3.types import Prompt

pytestmark = pytest.mark.unit


def numbered(count: int) -> Dataset:
    return Dataset(
        prompts=tuple(
            Prompt(id=str(i), messages=(), tokens_T=(i,), answer="") for i in range(count)
        )
    )


def walk(dataset: Dataset, *, seed: int, steps: int, count: int) -> list[str]:
    return [
        p.id
        for step in range(steps)
        for p in prompts_of_step(dataset, seed=seed, step=step, count=count)
    ]


@pytest.mark.parametrize(
    "count", [1, 3, 7, 10, 23]
)  # divides, does not divide, equals and exceeds the 10 rows
def test_each_epoch_is_a_permutation(count: int) -> None:
    dataset = numbered(10)
    order = walk(dataset, seed=1, steps=30, count=count)
    assert len(order) == 30 * count
    epochs = [order[i : i + 10] for i in range(0, len(order) - 9, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    # 10! orders: epochs are shuffled anew
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_order_depends_on_seed_and_step_alone() -> None:
    dataset = numbered(50)
    order = walk(dataset, seed=1, steps=20, count=8)
    assert [p.id for p in prompts_of_step(dataset, seed=1, step=13, count=8)] == order[
        13 * 8 : 14 * 8
    ]
    assert walk(dataset, seed=2, steps=20, count=8) != order


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (3.0, 1.0, 1e-3), (5.0,), (0.1,) * 7])
def test_turns_keep_to_the_shares_at_every_place(weights: tuple[float, ...]) -> None:
    counts = [turns(weights, places) for places in range(400)]
    for places, (now, after) in enumerate(pairwise(counts)):
        assert sum(now) == places
        assert sorted(b - a for a, b in zip(now, after, strict=True)) == [0] * (
            len(weights) - 1
        ) + [1]
        exact = [places * weight / sum(weights) for weight in weights]
        assert all(abs(a - b) < len(weights) for a, b in zip(now, exact, strict=True))


def test_turns_by_hand() -> None:
    assert [turns((1, 1), places) for places in range(5)] == [
        [0, 0],
        [0, 1],
        [1, 1],
        [1, 2],
        [2, 2],
    ]
    assert turns((3, 1), 100) == [75, 25]


def test_weighted_sources_have_epochs_of_their_own_and_resume_exactly() -> None:
    pool = numbered(14)
    dataset = Dataset(prompts=pool.prompts, read=(("a", 10), ("b", 4)), weights=(0.25, 0.75))
    assert len(dataset) == 14
    # 140 places: 35 of the first ten, 105 of the last four
    order = walk(dataset, seed=1, steps=20, count=7)
    first, second = [i for i in order if int(i) < 10], [i for i in order if int(i) >= 10]
    assert (len(first), len(second)) == (35, 105)
    for stream, size in ((first, 10), (second, 4)):
        epochs = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    for step in (0, 3, 19):
        drawn = [p.id for p in prompts_of_step(dataset, seed=1, step=step, count=7)]
        assert drawn == order[step * 7 : step * 7 + 7]
    assert walk(dataset, seed=2, steps=20, count=7) != order


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        prompts_of_step(numbered(0), seed=0, step=0, count=1)
