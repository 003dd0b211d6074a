"""Advantages: a rollout's reward compared with other rollouts, and the penalty on long responses.

Every advantage has the signature `(rewards_R, groups_R) -> advantages_R`. `rewards_R` are floats,
`groups_R` int64 labels of any value; rollouts of a group may be anywhere in the list. Both are on
the host and have the rewards of the whole step, of all ranks: some estimators take statistics over
all of them. A new estimator is one function, one line in `ADVANTAGES` and one row in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from r3.algo.sums import TOLERANCE
from r3.types import Key

# Of the papers; rewards that differ by rounding alone are equal before it matters.
STD_EPSILON = 1e-6


class _Groups(NamedTuple):
    """Statistics of each rollout's own group, repeated for every rollout of it.

    Attributes:
        rewards_R: the rewards in float64, so that statistics do not depend on the rollouts' order.
        flat_R: the rewards of the group differ by rounding at most: nothing to learn from it.
    """

    rewards_R: Tensor
    mean_R: Tensor
    std_R: Tensor
    size_R: Tensor
    flat_R: Tensor


def _groups(rewards_R: Tensor, groups_R: Tensor) -> _Groups:
    if rewards_R.dim() != 1 or rewards_R.shape != groups_R.shape:
        raise ValueError(
            f"rewards have shape {list(rewards_R.shape)} and groups {list(groups_R.shape)}: "
            "both must be [R]"
        )
    if groups_R.dtype != torch.int64:
        raise ValueError(f"groups must be int64 labels, got {groups_R.dtype}")
    if not bool(torch.isfinite(rewards_R).all()):
        bad = torch.nonzero(~torch.isfinite(rewards_R)).flatten().tolist()
        raise ValueError(
            f"rewards must be finite: {rewards_R[bad[:8]].tolist()} at rollouts {bad[:8]}"
        )

    rewards_R = rewards_R.double()
    _, index_R, sizes = torch.unique(groups_R, return_inverse=True, return_counts=True)
    zeros = rewards_R.new_zeros(len(sizes))
    mean_R = (zeros.index_add(0, index_R, rewards_R) / sizes)[index_R]
    squares = zeros.index_add(0, index_R, (rewards_R - mean_R).square())
    std_R = (squares / (sizes - 1).clamp(min=1)).sqrt()[index_R]
    # From the rewards themselves, as `sums.are_equal`: the mean of three 0.1 is not exactly 0.1,
    # and rounding must not become an advantage.
    low = zeros.scatter_reduce(0, index_R, rewards_R, "amin", include_self=False)
    high = zeros.scatter_reduce(0, index_R, rewards_R, "amax", include_self=False)
    flat = high - low <= TOLERANCE * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return _Groups(rewards_R, mean_R, std_R, sizes[index_R], flat[index_R])


def grpo(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Group-relative advantage of GRPO (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean_g) / (std_g + 1e-6)

    with the unbiased standard deviation (over G - 1). A group with equal rewards, or with a single
    rollout, gets exactly 0.
    """
    group = _groups(rewards_R, groups_R)
    advantages_R = (group.rewards_R - group.mean_R) / (group.std_R + STD_EPSILON)
    return advantages_R.masked_fill(group.flat_R, 0.0).float()


def dr_grpo(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Advantage of Dr. GRPO (arXiv 2503.20783, section 3.2): centred, no standard deviation.

        A_i = R_i - mean_g

    Division by std_g would give more weight to questions that are nearly always or nearly never
    answered. A group with equal rewards gets exactly 0.
    """
    group = _groups(rewards_R, groups_R)
    return (group.rewards_R - group.mean_R).masked_fill(group.flat_R, 0.0).float()


def rloo(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Leave-one-out advantage of RLOO (arXiv 2402.14740, section 2.2).

        A_i = R_i - mean of the others = G / (G - 1) (R_i - mean_g)

    The baseline does not contain the rollout's own reward, so it is unbiased. A group with equal
    rewards, or with a single rollout, gets exactly 0.
    """
    group = _groups(rewards_R, groups_R)
    scale_R = group.size_R / (group.size_R - 1).clamp(min=1)
    return (scale_R * (group.rewards_R - group.mean_R)).masked_fill(group.flat_R, 0.0).float()


def reinforce_pp(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Advantage of REINFORCE++ (arXiv 2501.03262): rewards whitened over the step, groups ignored.

        A_i = (R_i - mean) / (std + 1e-6)

    with mean and (unbiased) std over all rollouts of all ranks. A step with equal rewards gets
    exactly 0.

    The paper differs: token t has the advantage R_i - beta * (sum of KL over the tokens from t on),
    whitened over all tokens of the step. Here each rollout has one advantage and one weight in mean
    and std, whatever its length. With algo.kl_in reward the KL of the whole response is subtracted,
    the same for each of its tokens.
    """
    _groups(rewards_R, groups_R)  # for its checks
    group = _groups(rewards_R, torch.zeros_like(groups_R))
    advantages_R = (group.rewards_R - group.mean_R) / (group.std_R + STD_EPSILON)
    return advantages_R.masked_fill(group.flat_R, 0.0).float()


def reinforce_pp_baseline(rewards_R: Tensor, groups_R: Tensor) -> Tensor:
    """Advantage of REINFORCE++ with baseline (arXiv 2501.03262): centred per group, one scale.

        C_i = R_i - mean_g           A_i = C_i / (std of all C + 1e-6)

    All groups have the same scale, so small differences within a group are not enlarged as in
    `grpo`. The mean of all C is 0 and need not be subtracted. A group with equal rewards gets
    exactly 0.
    """
    group = _groups(rewards_R, groups_R)
    centred_R = (group.rewards_R - group.mean_R).masked_fill(group.flat_R, 0.0)
    std = (centred_R.square().sum() / max(1, len(centred_R) - 1)).sqrt()
    return (centred_R / (std + STD_EPSILON)).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The reward of one sample of a step, as every rank knows it.

    Attributes:
        key: `Rollout.key` of the sample.
        unit: what has one advantage: the sequences of an episode have the key of its first one,
            unless each has a reward of its own.
        baseline: what its advantage is compared with (`algo.baseline`): (group, 0), or
            (group, sequence) for rewarded sequences with the same index in their episodes.
        raw: as reward functions and environments gave it.
        shaped: what its advantage is made of: minus the overlong penalty and, with algo.kl_in
            reward, minus the KL. Equal for all samples of a unit.
        deciding: a second value that decides whether its group has signal
            (`algo.dynamic_sampling_metric`); `shaped` if there is none.
        has_loss: whether any of its tokens has loss.
    """

    key: Key
    unit: Key
    baseline: tuple[int, int]
    raw: float
    shaped: float
    deciding: float
    has_loss: bool = True


def advantages_of(
    rewards: Sequence[Reward], advantage: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply an advantage to the rewards of a step, of all ranks, and return it per sample.

    A unit may have several token sequences; each of them gets the unit's advantage, and the unit
    counts once in every mean and standard deviation.
    """
    units: dict[Key, Reward] = {}
    for each in rewards:
        units.setdefault(each.unit, each)
    numbers = {unit: number for number, unit in enumerate(units)}
    labels: dict[tuple[int, int], int] = {}
    groups = [labels.setdefault(each.baseline, len(labels)) for each in units.values()]
    rewards_U = torch.tensor([each.shaped for each in units.values()], dtype=torch.float64)
    advantages_U = advantage(rewards_U, torch.tensor(groups, dtype=torch.int64))
    return advantages_U[torch.tensor([numbers[each.unit] for each in rewards], dtype=torch.int64)]


def less_kl(rewards: Sequence[Reward], kl: Mapping[int, float], coef: float) -> list[Reward]:
    """Return the rewards R_i - coef * sum_t KL_t (arXiv 2402.14740, eq. 3).

    Args:
        kl: summed KL of every sample, by place; none leaves the rewards as they are. An episode of
            several sequences has the KL of all of them.
    """
    if not kl:
        return [*rewards]
    of_unit: dict[Key, float] = {}
    for place, each in enumerate(rewards):
        of_unit[each.unit] = of_unit.get(each.unit, 0.0) + kl.get(place, 0.0)
    return [replace(each, shaped=each.shaped - coef * of_unit[each.unit]) for each in rewards]


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def overlong_penalty(num_tokens: int, *, max_response_tokens: int, buffer: int) -> float:
    """Return the soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13), to add to the reward.

        0                                      |y| <= L - B
        ((L - B) - |y|) / B                    L - B < |y| <= L
        -1                                     |y| > L

    with L = max_response_tokens and B = buffer, in tokens. The paper has L = 20480 and B = 4096.
    B = 0 disables the penalty. |y| counts what L limits: all tokens after the prompt, observations
    included. If it counted sampled tokens only, a conversation that reaches L might have no
    penalty.

    Raises:
        ValueError: the buffer is not within 0 .. max_response_tokens.
    """
    if not 0 <= buffer <= max_response_tokens:
        raise ValueError(f"the buffer must be within 0 .. {max_response_tokens}, got {buffer}")
    if not buffer:
        return 0.0
    over = num_tokens - (max_response_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)
