"""One round of answers: share the questions out over the engines, sample, and judge each answer while others still run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r3.diagnostics import Mean, StandardDeviation, Sum
from r3.engine import Engine, Request, sampling_seed
from r3.mesh import Mesh
from r3.types import Prompt, Rollout

Judge = Callable[[Rollout, Prompt], float]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """This rank's rollouts and their rewards, parallel lists, groups whole and in order.

    Empty on ranks that only lend their device to another rank's engine.
    """

    rollouts: list[Rollout]
    rewards: list[float]


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    judge: Judge,
    mesh: Mesh,
    *,
    members: int,
    version: int,
    run_seed: int,
    seed_step: int,
    max_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    on_answer: Callable[[], None] = lambda: None,
) -> Answers:
    """Answer every prompt `members` times with the policy of `version`.

    `prompts` are all of the round, the same on every rank; engine i takes prompts i, i + n, ... of n engines. What is sampled
    depends on (run_seed, seed_step, prompt, member) alone. Ranks of one engine must call together; engines are independent.
    """
    groups = range(mesh.engine_dp.rank, len(prompts), mesh.engine_dp.size)
    requests = [
        Request(
            prompt=prompts[group],
            group=group,
            member=member,
            # The group too: at the border of two epochs one question may come twice in a step.
            seed=sampling_seed(run_seed, seed_step, f"{prompts[group].id}/{group}", member),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
        for group in groups
        for member in range(members)
    ]
    rewards = [0.0] * len(requests)

    def finished(index: int, rollout: Rollout) -> None:
        rewards[index] = judge(rollout, requests[index].prompt)
        on_answer()

    rollouts = engine.generate(requests, version=version, on_finished=finished)
    if mesh.engine_tp.rank != 0:  # ranks of one engine hold the same answers; the first speaks for them
        return Answers(rollouts=[], rewards=[])
    return Answers(rollouts=rollouts, rewards=rewards)


def rollout_metrics(answers: Answers, group_size: int) -> dict[str, Any]:
    """Partials of reward/* and rollout/* for this rank's answers."""
    rewards, count = answers.rewards, float(len(answers.rewards))
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    response_tokens = float(sum(rollout.num_response_tokens for rollout in answers.rollouts))
    truncated = float(sum(rollout.finish_reason == "length" for rollout in answers.rollouts))
    return {
        "reward/mean": Mean(total=sum(rewards), count=count),
        "reward/std": StandardDeviation(tuple(rewards)),
        "reward/group_zero_std_frac": Mean(
            total=float(sum(max(group) == min(group) for group in groups)), count=float(len(groups))
        ),
        "rollout/response_tokens_mean": Mean(total=response_tokens, count=count),
        "rollout/truncated_frac": Mean(total=truncated, count=count),
        "rollout/tokens": Sum(value=float(sum(len(rollout.tokens_T) for rollout in answers.rollouts))),
    }
