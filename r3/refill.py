"""The answers that a step trains on: one round, or, with dynamic sampling, as many as it takes to find groups with signal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3.config import Config
from r3.data import prompts_of_step
from r3.diagnostics import Mean
from r3.engine import Engine
from r3.exchange import Rewards, gather_rewards
from r3.mesh import Mesh
from r3.rollout import Answers, answer, rollout_metrics
from r3.start import Task


class NoSignalError(RuntimeError):
    """Every answer of a group is worth the same, in every group that could be found: there is nothing to learn from."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a step trains on: this rank's answers and everybody's rewards. `metrics`, partials, are of all that was sampled."""

    answers: Answers
    rewards: Rewards
    metrics: tuple[dict[str, Any], ...]


def answers_of_step(
    engine: Engine,
    task: Task,
    config: Config,
    mesh: Mesh,
    *,
    step: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Round:
    """Answers for `step`, sampled with the weights before it. All ranks must call.

    With `algo.dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all equal are left out, and
    as many new prompts are answered, for at most so many rounds. The prompts of round r are a pure function of (seed, step,
    r), in an order of their own, so a resumed run, on any layout, takes the same ones, and the first round is that of a run
    without refills. In the end the first `prompts_per_step` groups with signal are trained on; fewer, when rounds run out.

    Raises:
        NoSignalError: fewer groups have signal than `train.updates_per_step` needs.
    """
    rollout, rounds = config.rollout, config.algo.dynamic_sampling
    wanted, sampled = rollout.prompts_per_step, 0
    found: list[Answers] = []
    chosen: list[int] = []
    for number in range(1 + rounds):
        # Another order of the same prompts for each refill: the first round stays what it is without any.
        seed = config.train.seed + (number << 32)
        prompts = prompts_of_step(task.prompts, seed=seed, step=step - 1, count=wanted)[
            : wanted - len(chosen)
        ]
        found.append(
            answer(
                engine,
                prompts,
                task.judge,
                mesh,
                members=rollout.group_size,
                version=step - 1,
                run_seed=config.train.seed,
                seed_step=step,
                first_group=sampled,
                max_tokens=rollout.max_response_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                talk=task.talk,
                on_answer=on_answer,
            )
        )
        sampled += len(prompts)
        rewards = gather_rewards(found[-1], mesh.world, config)
        if not rounds:
            metrics = (found[0].facts, rollout_metrics(found[0]), rewards.metrics)
            return Round(answers=found[0], rewards=rewards, metrics=metrics)
        chosen += rewards.groups_with_signal
        if len(chosen) == wanted:
            break
    if len(chosen) < config.train.updates_per_step:
        raise NoSignalError(
            f"step {step}: of {sampled} groups in {1 + rounds} rounds {len(chosen)} have answers that differ in reward, and "
            f"{config.train.updates_per_step} are needed: the prompts are all solved or all out of reach"
        )
    everything = Answers.joined(found)
    answers = everything.of_groups(frozenset(chosen))
    rewards = gather_rewards(answers, mesh.world, config)
    counts = {"rounds": len(found), "groups_sampled": sampled, "groups_trained": len(chosen)}
    return Round(
        answers=answers,
        rewards=rewards,
        metrics=(
            *(part.facts for part in found),
            rollout_metrics(everything),
            rewards.metrics,
            # The same on all ranks.
            {f"rollout/{name}": Mean(total=float(count), count=1.0) for name, count in counts.items()},
        ),
    )
