"""Rollouts with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from r3.algo.advantage import ADVANTAGES, overlong_penalty
from r3.config import Config
from r3.metrics.reduce import Mean
from r3.rollout.collect import CollectedRollouts
from r3.runtime.mesh import Axis
from r3.types import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A rollout with what was made of it.

    `index` is its place among all rollouts of the step, `parts` what each component of the reward gave. One that does not
    `train` counted for its group's baseline, and gets no loss (algo.overlong_filter). `checksums` came with it when it was
    sent here: one for each layer of its routes, over tokens and rows.
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
    """What all rollouts of the step earned, of every rank and by index, the overlong penalty taken off; float64.

    `names_R` are (group, member) of each: the index counts on where a conversation was left out.
    """

    rewards_R: torch.Tensor
    groups_R: torch.Tensor
    names_R: tuple[tuple[int, int], ...]

    @property
    def groups_with_signal(self) -> list[int]:
        """Groups whose rewards are not all equal, ascending: those that teach something."""
        by_group: dict[int, set[float]] = {}
        for group, reward in zip(self.groups_R.tolist(), self.rewards_R.tolist(), strict=True):
            by_group.setdefault(group, set()).add(reward)
        return sorted(group for group, found in by_group.items() if len(found) > 1)

    @property
    def metrics(self) -> dict[str, Any]:
        """The partial of reward/shaped_mean, the same on all ranks."""
        return {"reward/shaped_mean": Mean(float(self.rewards_R.sum()), float(len(self.rewards_R)))}


def gather_rewards(answers: CollectedRollouts, world: Axis, config: Config) -> Rewards:
    """Everybody's rewards: advantages may need statistics of the whole step, in an order no layout changes.

    All ranks must call.
    """
    length, algo = config.rollout.max_response_tokens, config.algo
    own = [
        (
            (rollout.group, rollout.sample_index),
            reward
            + algo.overlong_penalty
            * overlong_penalty(
                rollout.num_tokens_after_prompt,
                max_response_tokens=length,
                buffer=algo.overlong_buffer,
            ),
        )
        for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True)
    ]
    everybody = sorted(item for part in world.all_gather_object(own) for item in part)
    return Rewards(
        rewards_R=torch.tensor([reward for _, reward in everybody], dtype=torch.float64),
        groups_R=torch.tensor([group for (group, _), _ in everybody], dtype=torch.int64),
        names_R=tuple(name for name, _ in everybody),
    )


def score_all(answers: CollectedRollouts, rewards: Rewards, config: Config) -> list[Scored]:
    """This rank's answers with their advantages and their numbers in the step. `rewards` are everybody's."""
    advantages_R = ADVANTAGES[config.algo.advantage](rewards.rewards_R, rewards.groups_R).tolist()
    index_of = {name: index for index, name in enumerate(rewards.names_R)}
    scored = []
    for rollout, reward in zip(answers.rollouts, answers.rewards, strict=True):
        index = index_of[rollout.group, rollout.sample_index]
        trains = not (config.algo.overlong_filter and rollout.finish_reason == "length")
        scored.append(
            Scored(
                index=index,
                rollout=rollout,
                advantage=advantages_R[index],
                reward=reward,
                parts=answers.parts.get((rollout.group, rollout.sample_index), {}),
                trains=trains,
            )
        )
    return scored
