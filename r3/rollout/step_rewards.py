"""The rewards of a step, of all ranks: what each is compared with, which groups have signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.algo.advantage import Reward, overlong_penalty
from r3.algo.sums import are_equal
from r3.config import Config
from r3.errors import Explained
from r3.metrics.reduce import Mean, StandardDeviation
from r3.runtime.mesh import Axis
from r3.types import Key, Sample


class DroppedError(Explained):
    """Too few groups are left to train on: environments or reward functions failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """What a rank sends of a sample: its own reward and penalty."""

    key: Key
    own_reward: bool | None
    reward: float
    penalty: float
    deciding: float
    has_loss: bool


def gather_rewards(samples: Sequence[Sample], world: Axis, config: Config) -> list[Reward]:
    """Gather the rewards of all ranks, in an order that does not depend on the layout.

    All ranks must call. Advantages may need statistics of the whole step.
    """
    algo = config.algo
    own = [
        _Given(
            key=sample.rollout.key,
            own_reward=sample.rollout.own_reward,
            reward=sample.reward,
            penalty=algo.overlong_penalty
            * overlong_penalty(
                sample.rollout.num_tokens_after_prompt,
                max_response_tokens=config.response_tokens(),
                buffer=algo.overlong_buffer,
            ),
            # An environment or a workflow may reward a conversation itself.
            deciding=sample.parts.get(config.reward.deciding, sample.reward),
            has_loss=sample.rollout.num_response_tokens > 0
            and not (algo.overlong_filter and sample.rollout.is_truncated),
        )
        for sample in samples
    ]
    everybody = [each for part in world.all_gather_object(own) for each in part]
    everybody.sort(key=lambda each: each.key)
    # An unfinished episode of a workflow that rewards calls: its sequences count by themselves, as
    # those of the other episodes do.
    by_call = any(each.own_reward for each in everybody)

    def unit_of(each: _Given) -> Key:
        alone = by_call if each.own_reward is None else each.own_reward
        return (*each.key[:2], each.key[2] if alone else 0)

    # An episode has the penalty of its longest sequence.
    penalties: dict[Key, float] = {}
    for each in everybody:
        penalties[unit_of(each)] = min(each.penalty, penalties.get(unit_of(each), each.penalty))
    decides = algo.dynamic_sampling > 0 and algo.dynamic_sampling_metric == "correct"
    rewards = []
    for each in everybody:
        group, _, sequence = unit = unit_of(each)
        shaped = each.reward + penalties[unit]
        rewards.append(
            Reward(
                key=each.key,
                unit=unit,
                baseline=(group, sequence if algo.baseline == "step" else 0),
                given=each.reward,
                shaped=shaped,
                deciding=each.deciding if decides else shaped,
                has_loss=each.has_loss,
            )
        )
    return rewards


def groups_of(rewards: Sequence[Reward]) -> list[int]:
    """All groups, ascending."""
    return sorted({each.key[0] for each in rewards})


def groups_with_loss(rewards: Sequence[Reward]) -> list[int]:
    """Groups in which some sample has loss, ascending. A teacher teaches all of them."""
    return groups_of([each for each in rewards if each.has_loss])


def groups_with_signal(rewards: Sequence[Reward]) -> list[int]:
    """Groups in which compared rewards differ and some sample has loss, ascending.

    Others have no gradient.
    """
    compared: dict[tuple[int, int], list[Reward]] = {}
    for each in rewards:
        compared.setdefault(each.baseline, []).append(each)
    return sorted(
        {
            group
            for (group, _), members in compared.items()
            if any(each.has_loss for each in members)
            and not are_equal([each.shaped for each in members])
            and not are_equal([each.deciding for each in members])
        }
    )


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Partials of the rewards of all ranks: one rank reports them."""
    units = {each.unit: each for each in rewards}.values()
    given, shaped = [each.given for each in units], [each.shaped for each in units]
    num_groups = len(groups_of(rewards))
    flat = num_groups - len(groups_with_signal(rewards))
    return {
        "reward/mean": Mean(math.fsum(given), float(len(given))),
        "reward/std": StandardDeviation(tuple(given)),
        "reward/shaped_mean": Mean(math.fsum(shaped), float(len(shaped))),
        "reward/group_zero_std_frac": Mean(float(flat), float(num_groups)),
    }


def require_groups(
    rewards: Sequence[Reward], config: Config, *, step: int, sampled: int, failure: str
) -> None:
    """Check that enough groups are left for the updates of a step.

    Args:
        sampled: groups of the step before conversations that failed were dropped.
        failure: why the first of them failed.

    Raises:
        DroppedError: fewer groups are left.
    """
    needed = config.train.updates_per_step  # a group is not split over several
    if (left := len(groups_of(rewards))) < needed:
        raise DroppedError(
            f"step {step}: {left} of {sampled} groups are left, and train.updates_per_step = "
            f"{needed} needs as many.\n  The others were dropped because their environment or "
            f"reward failed. The first failure:\n  {failure}"
        )
