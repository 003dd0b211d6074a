"""Rollouts with their rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from r3.algo.advantage import StepRewards, overlong_penalty, per_unit
from r3.algo.sums import are_equal
from r3.config import Config
from r3.metrics.reduce import Mean, StandardDeviation
from r3.rollout.collected_rollouts import CollectedRollouts
from r3.runtime.mesh import Axis
from r3.types import Rollout
from r3.user_code.algorithm import advantage_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A rollout with its reward and its advantage.

    Attributes:
        index: its place among all rollouts of the step.
        reward: as reward functions and environments gave it.
        shaped_reward: what its advantage is made of: the reward minus the overlong penalty and,
            with algo.kl_in reward, minus the KL.
        parts: the value of each component.
        trains: False if it counts for its group's baseline and gets no loss
            (`algo.overlong_filter`).
        checksums: one per layer of its routes, over tokens and rows, if it came from another rank.
    """

    index: int
    rollout: Rollout
    advantage: float
    reward: float = 0.0
    shaped_reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    trains: bool = True
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards(StepRewards):
    """Rewards of all rollouts of the step, of every rank, in the order of their indices.

    `rewards_R` has them minus the overlong penalty. `baselines_R` names the group of a rollout, or
    the rewarded sequences of the group that have its index in their episodes.

    Attributes:
        given_R: rewards as they were given, float64.
        deciding_R: further values that decide whether a group has signal
            (`algo.dynamic_sampling_metric`), float64; None: rewards alone do.
        trains_R: whether the rollout has tokens with loss, bool.
        groups_R: group of each rollout.
        names_R: (group, sample_index, sequence) of each rollout. Dropped conversations leave no
            gap in the indices.
    """

    given_R: torch.Tensor
    deciding_R: torch.Tensor | None = None
    trains_R: torch.Tensor
    groups_R: torch.Tensor
    names_R: tuple[tuple[int, int, int], ...]

    @property
    def groups_with_signal(self) -> list[int]:
        """Groups in which compared rewards differ and some rollout has loss, ascending.

        Others have no gradient.
        """
        columns = [self.rewards_R.tolist()]
        columns += [] if self.deciding_R is None else [self.deciding_R.tolist()]
        compared: dict[tuple[int, int], list[int]] = {}
        labels = zip(self.groups_R.tolist(), self.baselines_R.tolist(), strict=True)
        for index, label in enumerate(labels):
            compared.setdefault(label, []).append(index)
        return sorted(
            {
                group
                for (group, _), members in compared.items()
                if bool(self.trains_R[members].any())
                and not any(are_equal([column[i] for i in members]) for column in columns)
            }
        )

    @property
    def groups_with_loss(self) -> list[int]:
        """Groups in which some rollout has loss, ascending. A teacher teaches all of them."""
        return sorted(set(self.groups_R[self.trains_R].tolist()))

    @property
    def metrics(self) -> dict[str, Any]:
        """Partials of the rewards of all ranks: one rank reports them."""
        units = self.units_R.tolist()
        given = list(dict(zip(units, self.given_R.tolist(), strict=True)).values())
        shaped = list(dict(zip(units, self.rewards_R.tolist(), strict=True)).values())
        num_groups = len(self.groups_R.unique())
        return {
            "reward/mean": Mean(math.fsum(given), float(len(given))),
            "reward/std": StandardDeviation(tuple(given)),
            "reward/shaped_mean": Mean(math.fsum(shaped), float(len(shaped))),
            "reward/group_zero_std_frac": Mean(
                float(num_groups - len(self.groups_with_signal)), float(num_groups)
            ),
        }


class DroppedError(RuntimeError):
    """Too few groups are left to train on: environments or reward functions failed."""


def require_groups(rewards: Rewards, *, step: int, sampled: int, needed: int, failure: str) -> None:
    """Check that enough groups are left for the updates of a step.

    Args:
        sampled: groups of the step before conversations that failed were dropped.
        needed: updates of the step; a group is not split over several.
        failure: why the first of them failed.

    Raises:
        DroppedError: fewer groups are left.
    """
    if (left := len(rewards.groups_R.unique())) < needed:
        raise DroppedError(
            f"step {step}: {left} of {sampled} groups are left, and train.updates_per_step = "
            f"{needed} needs as many.\n  The others were dropped because their environment or "
            f"reward failed. The first failure:\n  {failure}"
        )


def gather_rewards(collected: CollectedRollouts, world: Axis, config: Config) -> Rewards:
    """Gather the rewards of all ranks, in an order that does not depend on the layout.

    All ranks must call. Advantages may need statistics of the whole step.
    """
    length, algo = config.rollout.max_response_tokens, config.algo
    values = collected.values_of(config.reward.deciding)
    own = [
        (
            (rollout.group, rollout.sample_index, rollout.sequence),
            rollout.own_reward,
            reward,
            algo.overlong_penalty
            * overlong_penalty(
                rollout.num_tokens_after_prompt,
                max_response_tokens=length,
                buffer=algo.overlong_buffer,
            ),
            value,
            trains(rollout, config) and rollout.num_response_tokens > 0,
        )
        for rollout, reward, value in zip(
            collected.rollouts, collected.rewards, values, strict=True
        )
    ]
    everybody = sorted(
        (item for part in world.all_gather_object(own) for item in part), key=lambda item: item[0]
    )
    names = [name for name, *_ in everybody]
    # An unfinished episode of a workflow that rewards calls: its sequences count by themselves, as
    # those of the other episodes do.
    by_call = any(own for _, own, *_ in everybody)
    units = [
        (*name[:2], name[2] if own or (own is None and by_call) else 0)
        for name, own, *_ in everybody
    ]
    # An episode has the penalty of its longest sequence.
    penalties: dict[tuple[int, int, int], float] = {}
    for unit, (*_, penalty, _, _) in zip(units, everybody, strict=True):
        penalties[unit] = min(penalty, penalties.get(unit, penalty))
    number_of = {unit: number for number, unit in enumerate(penalties)}
    # The last part of a unit is the index of a sequence that has a reward of its own, else 0.
    by_step = algo.baseline == "step"
    compared = [(unit[0], unit[2] if by_step else 0) for unit in units]
    label_of = {each: label for label, each in enumerate(dict.fromkeys(compared))}
    decides = algo.dynamic_sampling > 0 and algo.dynamic_sampling_metric == "correct"

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Rewards(
        rewards_R=column(
            [item[2] + penalties[unit] for unit, item in zip(units, everybody, strict=True)]
        ),
        given_R=column([item[2] for item in everybody]),
        deciding_R=column([item[4] for item in everybody]) if decides else None,
        trains_R=torch.tensor([item[5] for item in everybody], dtype=torch.bool),
        groups_R=torch.tensor([name[0] for name in names], dtype=torch.int64),
        baselines_R=torch.tensor([label_of[each] for each in compared], dtype=torch.int64),
        names_R=tuple(names),
        units_R=torch.tensor([number_of[unit] for unit in units], dtype=torch.int64),
    )


def trains(rollout: Rollout, config: Config) -> bool:
    """Whether `algo.overlong_filter` leaves a rollout its loss."""
    return not (config.algo.overlong_filter and rollout.finish_reason == "length")


def score_all(collected: CollectedRollouts, rewards: Rewards, config: Config) -> list[Scored]:
    """Return this rank's rollouts with advantages and indices; `rewards` are those of all ranks.

    With algo.kl_in reward the advantages are 0 here: the training makes them, once, of rewards
    minus KL.
    """
    advantages_R = torch.zeros(len(rewards.rewards_R))
    if not config.algo.takes_kl_from_reward:
        advantages_R = per_unit(advantage_of(config.algo), rewards)
    index_of = {name: index for index, name in enumerate(rewards.names_R)}
    scored = []
    for rollout, reward in zip(collected.rollouts, collected.rewards, strict=True):
        index = index_of[rollout.group, rollout.sample_index, rollout.sequence]
        scored.append(
            Scored(
                index=index,
                rollout=rollout,
                advantage=float(advantages_R[index]),
                reward=reward,
                shaped_reward=float(rewards.rewards_R[index]),
                parts=collected.parts.get((rollout.group, rollout.sample_index), {}),
                trains=trains(rollout, config),
            )
        )
    return scored


def share_out(rollouts: Sequence[Rollout], rank: int, size: int) -> list[Scored]:
    """This rank's share of rollouts that every rank has, numbered from 0."""
    return [
        Scored(index=index, rollout=rollouts[index], advantage=0.0)
        for index in range(rank, len(rollouts), size)
    ]


def rescored(
    scored: Sequence[Scored], rewards_R: torch.Tensor, advantages_R: torch.Tensor
) -> list[Scored]:
    """Return rollouts with other shaped rewards and advantages, by index."""
    return [
        replace(
            item,
            shaped_reward=float(rewards_R[item.index]),
            advantage=float(advantages_R[item.index]),
        )
        for item in scored
    ]
