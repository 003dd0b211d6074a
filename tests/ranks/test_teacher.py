"""Teachers score as transformers does, in any layout, and each for its own source."""

from __future__ import annotations

import pytest

from tests.families import family_checkpoint, random_checkpoint
from tests.ranks import teacher_cases as cases
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def models(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A policy, and two teachers: a larger MoE, and a dense model."""
    larger = random_checkpoint(
        tmp_path_factory.mktemp("larger"), seed=1, num_hidden_layers=4, hidden_size=96
    )
    dense = family_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", seed=2)
    return model, [str(larger), str(dense)]


@pytest.mark.parametrize(("objective", "rank"), [("distill", 4), ("rl", 0)])
def test_teachers_score_as_transformers_and_become_advantages(
    objective: str, rank: int, models: tuple[str, list[str]]
) -> None:
    """Adapters are the policy's alone."""
    model, teachers = models
    given = {"model": model, "teachers": teachers, "objective": objective, "rank": rank}
    (found,) = run_world(cases.taught, 1, parallel={}, **given)
    assert found.by_hand
    # float32 on both sides: 1e-5 of logits of size 10. The other teacher differs by units.
    assert found.error < 1e-4
    assert found.again, "an update of the policy leaves the teachers alone"


def test_with_bypass_the_engine_stands_for_the_old_policy(models: tuple[str, list[str]]) -> None:
    """Two updates of one step, against a loop that takes every advantage from the engine's
    log-probabilities.
    """
    model, teachers = models
    run_world(cases.bypass, 1, model=model, teachers=teachers)


@pytest.mark.large
def test_teachers_do_not_depend_on_the_layout(models: tuple[str, list[str]]) -> None:
    model, teachers = models
    (one,) = run_world(cases.taught, 1, model=model, teachers=teachers, parallel={})
    assert one.kl[1] > 100 and abs(one.kl[0]) > 10
    axes = ("ep", "tp", "pp", "cp")
    rows = [{"parallel": {axis: 2}} for axis in axes]
    given = {"model": model, "teachers": teachers}
    for axis, ranks in zip(axes, run_rows(cases.taught, 2, rows, **given), strict=True):
        assert sum(each.kl[1] for each in ranks) == one.kl[1], axis
        # Sums in another order: 1e-6 of some 1000. A token scored by the other teacher or at
        # another place changes units.
        for name in ("logprobs", "kl"):
            own, whole = (
                [getattr(each, name) if name == "logprobs" else each.kl[0] for each in found]
                for found in (ranks, [one])
            )
            assert sum(own) == pytest.approx(sum(whole), rel=1e-4), (axis, name)
        for each in ranks:
            assert each.grad_norm == pytest.approx(one.grad_norm, rel=1e-3), axis
            assert each.again
