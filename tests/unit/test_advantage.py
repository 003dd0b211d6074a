"""Advantages against values worked out by hand and a loop over groups."""

import statistics

import pytest
import torch
from torch import Tensor

from r3.algo.advantage import ADVANTAGES, overlong_penalty

# Two groups, interleaved. Group 7: rewards 0 1 1 0, mean 1/2, unbiased std sqrt(1/3). Group -3: 2
# 5, std 3/sqrt(2).
REWARDS_R = torch.tensor([0.0, 2.0, 1.0, 1.0, 5.0, 0.0])
GROUPS_R = torch.tensor([7, -3, 7, 7, -3, 7])


def ragged(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Sizes differ, single rollouts may occur
    groups_R = torch.randint(-5, 5, (64,), generator=generator)
    # Ties and groups of zero spread occur
    return torch.randint(0, 3, (64,), generator=generator).float(), groups_R


def slow(name: str, rewards_R: Tensor, groups_R: Tensor) -> list[float]:
    """The formulas in Python floats, one rollout at a time."""
    rewards, groups = rewards_R.tolist(), groups_R.tolist()
    members = {
        g: [r for r, group in zip(rewards, groups, strict=True) if group == g] for g in groups
    }
    centred = [r - statistics.mean(members[g]) for r, g in zip(rewards, groups, strict=True)]
    advantages = []
    for reward, group, off_mean in zip(rewards, groups, centred, strict=True):
        mine = members[group]
        match name:
            case "grpo":
                value = off_mean / (statistics.stdev(mine) + 1e-6) if len(mine) > 1 else 0.0
            case "dr_grpo":
                value = off_mean
            case "rloo":
                others = (sum(mine) - reward) / (len(mine) - 1) if len(mine) > 1 else reward
                value = reward - others
            case "reinforce_pp":
                value = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            case "reinforce_pp_baseline":
                value = off_mean / (statistics.stdev(centred) + 1e-6)
        advantages.append(value)
    return advantages


CENTRED = torch.tensor([-0.5, -1.5, 0.5, 0.5, 1.5, -0.5])
_A, _B = 0.5 / (1 / 3**0.5 + 1e-6), 1.5 / (3 / 2**0.5 + 1e-6)  # 0.866, 0.707
BY_HAND = {
    "grpo": torch.tensor([-_A, -_B, _A, _A, _B, -_A]),
    "dr_grpo": CENTRED,
    # Group 7: a right one against 0 1 0, a wrong one against 1 1 0. Group -3: 2 against 5.
    "rloo": torch.tensor([-2 / 3, -3.0, 2 / 3, 2 / 3, 3.0, -2 / 3]),
    # Over all six: mean 1.5, squares 3 * 0.25 + 2 * 2.25 ... = 17.5, unbiased variance 3.5; groups
    # are not looked at.
    "reinforce_pp": (REWARDS_R.double() - 1.5) / (3.5**0.5 + 1e-6),
    # Squares 4 * .25 + 2 * 2.25 = 5.5, over 5: one scale for both groups.
    "reinforce_pp_baseline": CENTRED / (1.1**0.5 + 1e-6),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_by_hand(name: str) -> None:
    found_R = ADVANTAGES[name](REWARDS_R, GROUPS_R)
    # Rounded to float32 a few times: 2^-24 relative each.
    torch.testing.assert_close(found_R, BY_HAND[name].float(), rtol=1e-6, atol=0.0)
    assert ADVANTAGES[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_overlong_penalty_by_hand() -> None:
    """DAPO, eq. 13, with L = 20 and B = 5: nothing up to 15, then a fifth a token, -1 from 20
    on.
    """
    lengths = [0, 15, 16, 18, 20, 21]
    found = [overlong_penalty(n, max_response_tokens=20, buffer=5) for n in lengths]
    assert found == pytest.approx([0.0, 0.0, -0.2, -0.6, -1.0, -1.0])
    assert overlong_penalty(20, max_response_tokens=20, buffer=0) == 0.0
    with pytest.raises(ValueError, match=r"within 0 \.\. 20, got 21"):
        overlong_penalty(3, max_response_tokens=20, buffer=21)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("seed", range(5))
def test_equals_a_loop_over_groups(name: str, seed: int) -> None:
    rewards_R, groups_R = ragged(seed)
    advantages_R = ADVANTAGES[name](rewards_R, groups_R)
    assert advantages_R.dtype == torch.float32
    # Both compute in float64; the result is rounded to float32 once, values are of order 1.
    expected_R = torch.tensor(slow(name, rewards_R, groups_R), dtype=torch.float64)
    torch.testing.assert_close(advantages_R.double(), expected_R, rtol=1e-6, atol=1e-7)


# The contract of every advantage is in r3/tools/contract.py; test_contract.py runs it.


# Those whose baseline is the group's mean.
@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"reinforce_pp"}))
@pytest.mark.parametrize(
    "rewards",
    [
        *([0.1] * 3, [1.0] * 4, [-0.7], [1e8 / 3] * 7, [0.1 + 0.2, 0.3], [1e8, 1e8 + 1e-6]),
        [0.7 + 0.2 + 0.1, 0.7 + (0.2 + 0.1), 1.0],
        [0.7 - 0.6 - 0.1, 0.0],  # -2.8e-17
    ],
    ids=str,
)
def test_a_group_of_zero_spread_is_exactly_zero(name: str, rewards: list[float]) -> None:
    """Also where the mean of equal floats is not that float: (0.1 + 0.1 + 0.1) / 3 != 0.1, and
    where sums of weights round differently.
    """
    rewards_R = torch.tensor([*rewards, 0.0, 1.0], dtype=torch.float64)
    groups_R = torch.tensor([0] * len(rewards) + [1, 1])
    advantages_R = ADVANTAGES[name](rewards_R, groups_R)
    assert advantages_R[:-2].tolist() == [0.0] * len(rewards)
    assert (advantages_R[-2:] != 0).all()


@pytest.mark.parametrize("reward", [0.35, 0.95, 0.3])
def test_one_response_apart_from_equal_ones_has_the_formulas_advantage(reward: float) -> None:
    """Variances as E[x^2] - E[x]^2 in float32 gave such responses advantages of thousands."""
    rewards_R = torch.tensor([0.0] + [reward] * 7)
    # mean 7/8 r, unbiased variance 7 (r/8)^2 (1 + 7) / 7 = r^2 / 8
    expected = [-7 / 8 * 8**0.5] + [1 / 8 * 8**0.5] * 7
    found = ADVANTAGES["grpo"](rewards_R, torch.zeros(8, dtype=torch.int64)).tolist()
    assert found == pytest.approx(expected, rel=2e-5)  # 1e-6 is added to the deviation


def test_a_small_difference_is_no_rounding() -> None:
    rewards_R = torch.tensor([0.3, 0.3 + 1e-8], dtype=torch.float64)
    assert ADVANTAGES["dr_grpo"](rewards_R, torch.zeros(2, dtype=torch.int64)).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_step_of_zero_spread_is_exactly_zero(name: str) -> None:
    assert ADVANTAGES[name](torch.full((6,), 0.1), GROUPS_R).tolist() == [0.0] * 6


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    ("rewards_R", "groups_R", "fault"),
    [
        (REWARDS_R, GROUPS_R[:5], r"shape \[6\] and groups \[5\]"),
        (REWARDS_R[None], GROUPS_R[None], r"\[1, 6\]"),
        (REWARDS_R, GROUPS_R.float(), "float32"),
        (torch.tensor([1.0, torch.nan]), GROUPS_R[:2], r"nan.* at rollouts \[1\]"),
    ],
)
def test_guards(name: str, rewards_R: Tensor, groups_R: Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ADVANTAGES[name](rewards_R, groups_R)
