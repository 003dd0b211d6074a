"""Supervised fine-tuning computes the cross-entropy of transformers, in any layout."""

from __future__ import annotations

import json

import pytest

from tests.ranks import supervised_cases as cases
from tests.rows import write
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve chats of one to three turns with different lengths."""
    lines = []
    for number in range(12):
        messages = []
        for turn in range(1 + number % 3):
            messages += [
                {"role": "user", "content": f"Tom has {number} books. He buys {turn}. How many?"},
                {"role": "assistant", "content": f"{number}+{turn}={number + turn}\n" * (turn + 1)},
            ]
        lines.append(json.dumps({"messages": messages}))
    return str(write(tmp_path_factory.mktemp("rows"), *lines))


def test_loss_and_gradients_equal_those_of_transformers(rows: str, model: str) -> None:
    (found,) = run_world(cases.against_transformers, 1, data=rows, model=model)
    assert found.tokens > 100
    # float32 on both sides; sums in another order leave 1e-6. A token more or less in the mask, or
    # a mean over rows, changes percent.
    assert found.loss == pytest.approx(found.expected, rel=1e-5)
    wrong = {name: error for name, error in found.errors.items() if not error <= 1e-4}
    assert wrong == {}


@pytest.mark.large
def test_an_update_does_not_depend_on_the_layout(rows: str, model: str) -> None:
    (one,) = run_world(cases.update, 1, data=rows, model=model, parallel={})
    assert not one.replayed and one.mismatch == []
    assert one.loss == pytest.approx(one.nll[0] / one.nll[1], rel=1e-6), "mean over loss tokens"
    layouts = [{"parallel": {axis: 2}} for axis in ("ep", "tp", "pp", "cp")]
    given = {"data": rows, "model": model}
    for parallel, found in zip(layouts, run_rows(cases.update, 2, layouts, **given), strict=True):
        assert sum(each.nll[1] for each in found) == one.nll[1], parallel
        # Sums in another order: 1e-6. A rank that divided by its own count would be off by tenths.
        total = sum(each.nll[0] for each in found)
        assert total == pytest.approx(one.nll[0], rel=1e-5), parallel
        for each in found:
            assert each.grad_norm == pytest.approx(one.grad_norm, rel=1e-4), parallel
