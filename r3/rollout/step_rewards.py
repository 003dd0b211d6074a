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
class _Sent:
    """What a rank sends of a sample: its own reward and penalty."""

    key: Key
    source: str
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
        _Sent(
            key=sample.rollout.key,
            source=sample.rollout.prompt_id.rpartition(":")[0] if config.data.env else "",
            own_reward=sample.rollout.own_reward,
            reward=sample.reward,
            penalty=algo.overlong_penalty
            * overlong_penalty(
                sample.rollout.num_tokens_after_prompt,
                max_response_tokens=config.response_tokens(),
                buffer=algo.overlong_buffer,
            ),
            # An environment or a workflow may reward a conversation itself, or each of its calls.
            deciding=sample.reward
            if sample.rollout.own_reward
            else sample.parts.get(config.reward.deciding, sample.reward),
            has_loss=sample.rollout.num_response_tokens > 0
            and not (algo.overlong_filter and sample.rollout.is_truncated),
        )
        for sample in samples
    ]
    everybody = [sent for part in world.all_gather_object(own) for sent in part]
    everybody.sort(key=lambda sent: sent.key)
    # An unfinished episode of a workflow that rewards calls: its sequences count by themselves, as
    # those of the other episodes do. With data.env a source has its own workflow.
    by_call = {sent.source for sent in everybody if sent.own_reward}

    def unit_of(sent: _Sent) -> Key:
        alone = sent.source in by_call if sent.own_reward is None else sent.own_reward
        return (*sent.key[:2], sent.key[2] if alone else 0)

    # An episode has the penalty of its longest sequence.
    penalties: dict[Key, float] = {}
    for sent in everybody:
        penalties[unit_of(sent)] = min(sent.penalty, penalties.get(unit_of(sent), sent.penalty))
    decides = algo.dynamic_sampling > 0 and algo.dynamic_sampling_metric == "correct"
    rewards = []
    for sent in everybody:
        group, _, sequence = unit = unit_of(sent)
        shaped = sent.reward + penalties[unit]
        rewards.append(
            Reward(
                key=sent.key,
                unit=unit,
                baseline=(group, sequence if algo.baseline == "step" else 0),
                raw=sent.reward,
                shaped=shaped,
                deciding=sent.deciding if decides else shaped,
                has_loss=sent.has_loss,
            )
        )
    return rewards


def groups_of(rewards: Sequence[Reward]) -> list[int]:
    """All groups, ascending."""
    return sorted({reward.key[0] for reward in rewards})


def groups_with_loss(rewards: Sequence[Reward]) -> list[int]:
    """Groups in which some sample has loss, ascending. A teacher teaches all of them."""
    return groups_of([reward for reward in rewards if reward.has_loss])


def groups_with_signal(rewards: Sequence[Reward]) -> list[int]:
    """Groups in which compared rewards differ and some sample has loss, ascending.

    Others have no gradient.
    """
    compared: dict[tuple[int, int], list[Reward]] = {}
    for reward in rewards:
        compared.setdefault(reward.baseline, []).append(reward)
    return sorted(
        {
            group
            for (group, _), members in compared.items()
            if any(reward.has_loss for reward in members)
            and not are_equal([reward.shaped for reward in members])
            and not are_equal([reward.deciding for reward in members])
        }
    )


def reward_metrics(rewards: Sequence[Reward], config: Config) -> dict[str, Any]:
    """Partials of the rewards of all ranks: one rank reports them."""
    units = {unit.unit: unit for unit in rewards}.values()
    raw, shaped = [unit.raw for unit in units], [unit.shaped for unit in units]
    num_groups = len(groups_of(rewards))
    flat = num_groups - len(groups_with_signal(rewards))
    metrics: dict[str, Any] = {
        "reward/mean": Mean(math.fsum(raw), float(len(raw))),
        "reward/std": StandardDeviation(tuple(raw)),
        "reward/shaped_mean": Mean(math.fsum(shaped), float(len(shaped))),
    }
    # Else nothing is compared, or with the whole step.
    if config.rollout.group_size > 1 and config.algo.advantage != "reinforce_pp":
        metrics["reward/group_zero_std_frac"] = Mean(float(flat), float(num_groups))
    return metrics


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
