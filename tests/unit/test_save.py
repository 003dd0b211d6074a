"""When a checkpoint is due."""

from __future__ import annotations

import pytest

from r3.run.save import is_checkpoint_due

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("every", "steps"), [(-1, []), (0, [7]), (1, [*range(1, 8)]), (3, [3, 6, 7])]
)
def test_checkpoints_are_due_as_the_setting_says(every: int, steps: list[int]) -> None:
    assert [step for step in range(1, 8) if is_checkpoint_due(step, every, last=7)] == steps
