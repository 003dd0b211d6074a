"""Checkpoints, exports and the end of a run, over two attempts that resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import saver_cases as cases
from tests.world import run_world

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.large)])
def test_the_best_stays_exports_come_and_patience_ends_the_run(
    ranks: int, model: str, tmp_path: Path
) -> None:
    results = run_world(
        cases.attempts, ranks, model=model, out=str(tmp_path / "run"), parallel={"ep": ranks}
    )
    first, second, third = results[0]
    assert all(each == results[0] for each in results)
    # Saved after steps 2 and 4, which were better than all before, and after 3. The export of step
    # 3 failed, and the run went on.
    assert first.steps == [1, 2, 3, 4] and first.kept == [4] and first.exports == []
    # Steps 6 and 8 are not better than 4: the count goes on over the resume, although the rows
    # were lost, and the run ends.
    assert second.steps == [5, 6, 7, 8]
    assert second.kept == [4, 8]
    assert (second.best, second.latest) == ("step_000004", "step_000008")
    assert second.exports == ["step_000006", "step_000008"], "every third step, and the last"
    # With more patience it goes on, and finds a better one.
    assert third.steps == list(range(9, 21))
    assert third.kept == [10, 20]
    assert third.exports == [f"step_{step:06d}" for step in (6, 8, 9, 12, 15, 18, 20)]
    assert third.best == "step_000010"
