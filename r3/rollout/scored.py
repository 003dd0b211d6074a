"""Rollouts with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from r3.algo.advantage import overlong_penalty, per_unit
from r3.config import Config
from r3.metrics.reduce import Mean
from r3.rollout.collected import CollectedRollouts
from r3.runtime.algorithm import advantage_of
from r3.runtime.mesh import Axis
from r3.types import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A rollout with its reward and its advantage.

    Attributes:
        index: its place among all rollouts of the step.
        parts: the reward of each component.
        trains: False if it counts for its group's baseline and gets no loss
            (`algo.overlong_filter`).
        checksums: one per layer of its routes, over tokens and rows, if it came from another rank.
    """

    index: int
    rollout: Rollout
    advantage: float
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    trains: bool = True
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of all rollouts of the step, of every rank, in the order of their indices.

    Attributes:
        rewards_R: rewards minus the overlong penalty, float64; equal for all sequences of an
            episode that has one reward.
        groups_R: group of each rollout.
        baselines_R: label of what its reward is compared with (`algo.baseline`): its group, or the
            rewarded sequences of the group that have its index in their episodes.
        names_R: (group, sample_index, sequence) of each rollout. Dropped conversations leave no
            gap in the indices.
        units_R: what has one advantage, numbered from 0: rollouts of one unit are the sequences of
            an episode.
    """

    rewards_R: torch.Tensor
    groups_R: torch.Tensor
    baselines_R: torch.Tensor
    names_R: tuple[tuple[int, int, int], ...]
    units_R: torch.Tensor

    @property
    def groups_with_signal(self) -> list[int]:
        """Groups in which compared rewards differ, ascending. Others have no gradient."""
        compared: dict[tuple[int, int], set[float]] = {}
        rows = (self.groups_R.tolist(), self.baselines_R.tolist(), self.rewards_R.tolist())
        for group, baseline, reward in zip(*rows, strict=True):
            compared.setdefault((group, baseline), set()).add(reward)
        return sorted({group for (group, _), found in compared.items() if len(found) > 1})

    @property
    def metrics(self) -> dict[str, Any]:
        """Partial of reward/shaped_mean, the same on all ranks."""
        by_unit = dict(zip(self.units_R.tolist(), self.rewards_R.tolist(), strict=True))
        return {"reward/shaped_mean": Mean(sum(by_unit.values()), float(len(by_unit)))}


class DroppedError(RuntimeError):
    """Too few groups are left to train on: environments or reward functions failed."""


def require_groups(rewards: Rewards, *, step: int, sampled: int, needed: int) -> None:
    """Check that enough groups are left for the updates of a step.

    Args:
        sampled: groups of the step before conversations that failed were dropped.
        needed: updates of the step; a group is not split over several.

    Raises:
        DroppedError: fewer groups are left.
    """
    if (left := len(rewards.groups_R.unique())) < needed:
        raise DroppedError(
            f"step {step}: {left} of {sampled} groups are left, and train.updates_per_step = "
            f"{needed} needs as many.\n  The others were dropped because their environment or "
            "reward failed. Set env.on_error and reward.on_error to stop to see the first failure."
        )


def gather_rewards(collected: CollectedRollouts, world: Axis, config: Config) -> Rewards:
    """Gather the rewards of all ranks, in an order that does not depend on the layout.

    All ranks must call. Advantages may need statistics of the whole step.
    """
    length, algo = config.rollout.max_response_tokens, config.algo
    own = [
        (
            (rollout.group, rollout.sample_index, rollout.sequence),
            rollout.unit,
            reward,
            algo.overlong_penalty
            * overlong_penalty(
                rollout.num_tokens_after_prompt,
                max_response_tokens=length,
                buffer=algo.overlong_buffer,
            ),
        )
        for rollout, reward in zip(collected.rollouts, collected.rewards, strict=True)
    ]
    everybody = sorted(item for part in world.all_gather_object(own) for item in part)
    # An episode has the penalty of its longest sequence.
    penalties: dict[tuple[int, int, int], float] = {}
    for _, unit, _, penalty in everybody:
        penalties[unit] = min(penalty, penalties.get(unit, penalty))
    number_of = {unit: number for number, unit in enumerate(penalties)}
    # The last part of a unit is the index of a sequence that has a reward of its own, else 0.
    by_step = algo.baseline == "step"
    compared = [(name[0], unit[2] if by_step else 0) for name, unit, *_ in everybody]
    label_of = {each: label for label, each in enumerate(dict.fromkeys(compared))}
    return Rewards(
        rewards_R=torch.tensor(
            [reward + penalties[unit] for _, unit, reward, _ in everybody], dtype=torch.float64
        ),
        groups_R=torch.tensor([name[0] for name, *_ in everybody], dtype=torch.int64),
        baselines_R=torch.tensor([label_of[each] for each in compared], dtype=torch.int64),
        names_R=tuple(name for name, *_ in everybody),
        units_R=torch.tensor([number_of[unit] for _, unit, *_ in everybody], dtype=torch.int64),
    )


def score_all(collected: CollectedRollouts, rewards: Rewards, config: Config) -> list[Scored]:
    """Return this rank's rollouts with advantages and indices; `rewards` are those of all ranks."""
    advantages_R = per_unit(
        advantage_of(config.algo), rewards.rewards_R, rewards.baselines_R, rewards.units_R
    ).tolist()
    index_of = {name: index for index, name in enumerate(rewards.names_R)}
    scored = []
    for rollout, reward in zip(collected.rollouts, collected.rewards, strict=True):
        index = index_of[rollout.group, rollout.sample_index, rollout.sequence]
        trains = not (config.algo.overlong_filter and rollout.finish_reason == "length")
        scored.append(
            Scored(
                index=index,
                rollout=rollout,
                advantage=advantages_R[index],
                reward=reward,
                parts=collected.parts.get((rollout.group, rollout.sample_index), {}),
                trains=trains,
            )
        )
    return scored
