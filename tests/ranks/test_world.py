"""What runs the cases of other tests tells failures and ends what hangs."""

from __future__ import annotations

import pytest

from tests.ranks import world_cases
from tests.world import run_world

pytestmark = pytest.mark.ranks


def test_failing_rank_is_named_with_its_output() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 1.*said by rank 1"):
        run_world(world_cases.fails, 2, rank=1)


def test_hanging_rank_is_killed_and_the_next_world_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="not done after 5 s"):
        run_world(world_cases.hangs, 2, timeout_s=5.0, rank=1)
    monkeypatch.setenv("R3_WORLD", "now")
    first, second = run_world(world_cases.facts, 2, name="R3_WORLD")
    assert first[:2] == [0, "now"] and second[:2] == [1, "now"]
    assert first[2] != second[2], "ranks have hash seeds of their own, as in a run"


def test_the_process_that_forks_ranks_leaves_cuda_alone() -> None:
    # It asks whether there is a GPU. Without this, no rank could use CUDA afterwards.
    (environment,) = run_world(world_cases.forked_by, 1)
    assert "PYTORCH_NVML_BASED_CUDA_CHECK=1" in environment
