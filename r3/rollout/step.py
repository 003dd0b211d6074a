"""The answers that a step trains on: one round, or, with dynamic sampling, as many as it takes to find groups with signal.

With a token budget also those of groups that earlier steps began, see `r3.rollout.partial`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r3.config import Config
from r3.data.prompts import prompts_from, prompts_of_step
from r3.engine import Engine
from r3.metrics.reduce import Mean, Sum
from r3.rollout.collect import CollectedRollouts, answer, rollout_metrics
from r3.rollout.partial import Carry, deal, from_checkpoint, to_files, within_age
from r3.rollout.scored import Rewards, gather_rewards
from r3.rollout.task import Task
from r3.runtime.mesh import Mesh

_DROPPED = "rollout/dropped_by_budget"


class NoSignalError(RuntimeError):
    """Every answer of a group is worth the same, in every group that could be found: there is nothing to learn from."""


class BudgetError(RuntimeError):
    """So few conversations end within rollout.step_token_budget that there is nothing to train on."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a step trains on: this rank's answers and everybody's rewards. `metrics`, partials, are of all that was sampled.

    `carry` is what it leaves to the next step.
    """

    answers: CollectedRollouts
    rewards: Rewards
    metrics: tuple[dict[str, Any], ...]
    carry: Carry = field(default_factory=Carry)


class RolloutSource:
    """Gives each step the rollouts that it trains on, and keeps partial rollouts between steps.

    Attributes:
        size: rollouts that this rank's engine samples per step, without refills.
    """

    def __init__(self, engine: Engine, task: Task, config: Config, mesh: Mesh) -> None:
        self._engine, self._task, self._config, self._mesh = engine, task, config, mesh
        self._carry = Carry()
        rollout = config.rollout
        self.size = rollout.prompts_per_step * rollout.group_size // mesh.engine_dp.size

    def collect(self, step: int, on_rollout: Callable[[], None] = lambda: None) -> Round:
        """Sample and reward the rollouts of `step` with the weights before it. All ranks must call."""
        collected = answers_of_step(
            self._engine,
            self._task,
            self._config,
            self._mesh,
            step=step,
            carry=self._carry,
            on_answer=on_rollout,
        )
        self._carry = collected.carry
        return collected

    def state_files(self) -> dict[str, bytes]:
        """Files for a checkpoint that hold the partial rollouts of this rank's engine."""
        return to_files(self._carry, self._mesh.engine_dp.rank, is_leader=self._engine.is_leader)

    def restore(self, checkpoint: Path) -> None:
        """Continue with the partial rollouts of a checkpoint folder."""
        if self._config.rollout.step_token_budget:
            self._carry = from_checkpoint(
                checkpoint,
                self._task.prompts.prompts,
                engine=self._mesh.engine_dp.rank,
                engines=self._mesh.engine_dp.size,
                is_leader=self._engine.is_leader,
            )


def answers_of_step(
    engine: Engine,
    task: Task,
    config: Config,
    mesh: Mesh,
    *,
    step: int,
    carry: Carry | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> Round:
    """Answers for `step`, sampled with the weights before it. All ranks must call.

    With `algo.dynamic_sampling` (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all equal are left out, and
    as many new prompts are answered, for at most so many rounds. The prompts of round r are a pure function of (seed, step,
    r), in an order of their own, so a resumed run, on any layout, takes the same ones, and the first round is that of a run
    without refills. In the end the first `prompts_per_step` groups with signal are trained on; fewer, when rounds run out.

    Args:
        carry: what the step before left (rollout.step_token_budget); None = nothing.

    Raises:
        NoSignalError: fewer groups have signal than `train.updates_per_step` needs.
        BudgetError: fewer groups have an answer within the budget than it needs.
    """
    if config.rollout.step_token_budget and not config.algo.dynamic_sampling:
        return _with_carry(
            engine, task, config, mesh, step=step, carry=carry or Carry(), on_answer=on_answer
        )
    rollout, rounds = config.rollout, config.algo.dynamic_sampling
    wanted, sampled = rollout.prompts_per_step, 0
    found: list[CollectedRollouts] = []
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
                task.scorer,
                mesh,
                members=rollout.group_size,
                policy_version=step - 1,
                run_seed=config.train.seed,
                seed_step=step,
                first_group=sampled,
                max_tokens=rollout.max_response_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                budget=rollout.step_token_budget,
                conversation_setup=task.conversation_setup,
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
    everything = CollectedRollouts.joined(found)
    answers = everything.of_groups(frozenset(chosen))
    rewards = gather_rewards(answers, mesh.world, config)
    counts = {"rounds": len(found), "groups_sampled": sampled, "groups_trained": len(chosen)}
    return Round(
        answers=answers,
        rewards=rewards,
        metrics=(
            *(part.facts for part in found),
            *(
                {_DROPPED: Sum(float(len(part.held)))}
                for part in found
                if rollout.step_token_budget
            ),
            rollout_metrics(everything),
            rewards.metrics,
            # The same on all ranks.
            {
                f"rollout/{name}": Mean(total=float(count), count=1.0)
                for name, count in counts.items()
            },
        ),
    )


def _with_carry(
    engine: Engine,
    task: Task,
    config: Config,
    mesh: Mesh,
    *,
    step: int,
    carry: Carry,
    on_answer: Callable[[], None],
) -> Round:
    """A step under a token budget: `carry` goes on, new prompts fill up, and whole groups are trained on.

    Where too few groups end for the step's updates, its conversations are given the budget once more.
    """
    rollout = config.rollout
    everybody = mesh.world.all_gather_object((mesh.engine_dp.rank, carry.groups))
    waiting = sorted(group for _, groups in everybody for group in groups)
    carry = carry.renumbered({group: place for place, group in enumerate(waiting)})
    loads = [0] * mesh.engine_dp.size
    for number, groups in everybody:
        loads[number] += len(groups)
    count = rollout.prompts_per_step - len(waiting)
    prompts = prompts_from(task.prompts, seed=config.train.seed, start=carry.taken, count=count)
    places = [i for i, number in enumerate(deal(loads, count)) if number == mesh.engine_dp.rank]
    held, parts, dropped = carry.held, [carry.done], 0
    while True:
        found = answer(
            engine,
            prompts,
            task.scorer,
            mesh,
            members=rollout.group_size,
            policy_version=step - 1,
            run_seed=config.train.seed,
            seed_step=step,
            first_group=len(waiting),
            places=places,
            held=held,
            budget=rollout.step_token_budget,
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            conversation_setup=task.conversation_setup,
            on_answer=on_answer,
        )
        parts.append(found)
        held = within_age(found.held, step=step, max_staleness=rollout.max_staleness)
        dropped += len(found.held) - len(held)
        done = CollectedRollouts.joined(parts)
        left = Carry(held=held, done=done, taken=carry.taken + count)
        gathered = mesh.world.all_gather_object(({r.group for r in done.rollouts}, left.groups))
        unfinished = {group for _, groups in gathered for group in groups}
        whole = {group for groups, _ in gathered for group in groups} - unfinished
        if len(whole) >= config.train.updates_per_step:
            break
        if not unfinished:
            raise BudgetError(
                f"step {step}: {len(whole)} groups have an answer of at most rollout.step_token_budget = "
                f"{rollout.step_token_budget} tokens, and {config.train.updates_per_step} are needed\n"
                "  a larger budget, or rollout.max_staleness above 0, lets conversations go on"
            )
        prompts, places = [], []
    answers = done.of_groups(frozenset(whole)).in_order()
    rewards = gather_rewards(answers, mesh.world, config)
    stale = sum(each.num_stale_tokens(step - 1) for each in answers.rollouts)
    sampled = sum(each.num_response_tokens for each in answers.rollouts)
    return Round(
        answers=answers,
        rewards=rewards,
        metrics=(
            *(part.facts for part in parts),
            rollout_metrics(answers),
            rewards.metrics,
            {
                "rollout/carried": Sum(float(len(held))),
                _DROPPED: Sum(float(dropped)),
                "rollout/stale_tokens_frac": Mean(total=float(stale), count=float(sampled)),
            },
        ),
        carry=replace(left, done=done.of_groups(frozenset(left.groups))),
    )
