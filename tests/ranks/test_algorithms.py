"""Losses over whole sequences and statistics over the step do not depend on how ranks share
them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from r3.algo.loss import CORRECTIONS
from tests.ranks import algorithm_cases
from tests.world import run_rows, run_world

pytestmark = pytest.mark.ranks


def test_losses_do_not_depend_on_context_parallelism() -> None:
    """Every loss and every correction, with context parallelism of 2 against one rank that holds
    whole sequences.
    """
    (whole,) = run_world(algorithm_cases.losses, 1, cp=1)
    first, second = run_world(algorithm_cases.losses, 2, cp=2)
    assert first == second, "sums over the ranks that share sequences"
    for name, expected in whole.items():
        # Sums of some 150 float32 terms in another order; a rank that took its half for the whole
        # would be off by tenths.
        assert vars(first[name]) == pytest.approx(vars(expected), rel=1e-5, abs=1e-6), name
    for name in CORRECTIONS:
        assert 0 < whole[name].cut < 152, (
            f"{name}: some of the 152 loss tokens fall on each side of the bounds"
        )
    assert 0 < whole["gspo"].clipped < 152
    assert 0 < whole["own"].clipped < 152, "sums over whole responses"
    assert whole["entropy bonus"].loss < whole["ppo_clip"].loss
    assert whole["bypass"] == whole["old is the engine's"] != whole["ppo_clip"]


def test_kl_is_taken_from_rewards_before_advantages_in_any_layout(model: str) -> None:
    (one,) = run_world(algorithm_cases.kl_in_reward, 1, model=model, parallel={})
    # dr_grpo of R - 0.1 * sum of k1, each answer's sum made in a loop: float32 terms, added in
    # another order
    assert one.advantages == pytest.approx(one.by_hand, rel=1e-5, abs=1e-5)
    # An episode has the KL of both its sequences; tolerances as above.
    assert one.episodes == pytest.approx(one.episodes_by_hand, rel=1e-5, abs=1e-5)
    assert len(set(one.episodes)) == len(set(one.advantages)) / 2
    assert one.half_filtered == one.advantages, "a filtered response has its KL in the baseline"
    moved = [abs(a - b) for a, b in zip(one.advantages, one.without, strict=True)]
    assert min(moved) > 1e-2, "the policy has left the reference"
    assert one.filtered == SimpleNamespace(
        denominators=[1, 1], grad_norm=0.0, loss=0.0, entropy_over=0.0
    )
    rows = [{"parallel": {"cp": 2}}, {"parallel": {}}]
    for ranks in run_rows(algorithm_cases.kl_in_reward, 2, rows, model=model):
        # two passes of another layout, after an update of another layout: 1e-5 of the
        # log-probabilities' sum of some 10
        for rank in ranks:
            assert rank.advantages == pytest.approx(one.advantages, rel=1e-3, abs=1e-3)
            assert rank.episodes == pytest.approx(one.episodes, rel=1e-3, abs=1e-3)
        total, count = (sum(rank.kl[i] for rank in ranks) for i in (0, 1))
        assert count == one.kl[1]
        assert total == pytest.approx(one.kl[0], rel=1e-3)
