"""The matrix and the lists: a row per family, a column per ability, a sentence per limit."""

from __future__ import annotations

import pytest

from r3.models import FAMILIES
from tests.matrix import cells
from tests.matrix.results import CELLS, COLUMNS, results
from tests.published import LAYOUTS
from tests.world import ROOT

pytestmark = pytest.mark.unit


def unproved(found: dict[str, dict[str, str]]) -> set[str]:
    """Architectures without a layout that trained by RL."""
    proved = {
        layout.listed
        for name, layout in LAYOUTS.items()
        if found.get(name, {}).get("rl") == "passed"
    }
    return FAMILIES.keys() - proved


def test_a_family_is_listed_only_if_it_trained_as_it_is_published() -> None:
    found = results()
    assert unproved(found) == set()
    # Control: one that failed, and one that was only refused.
    name = "openai/gpt-oss-20b"
    for outcome in ("failed", "refused"):
        assert unproved(found | {name: {"rl": outcome}}) == {"GptOssForCausalLM"}
    assert unproved(found | {"Qwen/Qwen3.5-35B-A3B": {"rl": "refused"}}) != set()


def test_the_diagonal_has_every_family_and_every_ability() -> None:
    diagonal = [(layout.listed, cell) for layout in LAYOUTS.values() for cell in layout.diagonal]
    assert {family for family, _ in diagonal} == FAMILIES.keys()
    assert {cell for _, cell in diagonal} == set(CELLS)
    assert len(diagonal) <= 30, "`make test` has two minutes for it"
    assert not [
        (name, cell) for name, one in LAYOUTS.items() for cell in one.diagonal if cell in one.limits
    ]


def test_results_are_of_layouts_and_cells_that_exist() -> None:
    found = results()
    assert found.keys() <= LAYOUTS.keys()
    for name, outcomes in found.items():
        assert outcomes.keys() <= set(COLUMNS)
        for column, outcome in outcomes.items():
            cell = column.partition(" ")[0]
            assert (outcome == "refused") <= (cell in LAYOUTS[name].limits), (name, column)
    assert all(callable(getattr(cells, cell)) for cell in CELLS)


def test_every_limit_is_documented() -> None:
    limits = {each for layout in LAYOUTS.values() for each in layout.limits.values()}
    for limit in limits:
        page = (ROOT / "docs" / limit.page).read_text(encoding="utf-8")
        assert limit.documented in " ".join(page.split()), limit
