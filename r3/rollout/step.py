"""The rollouts that a step trains on: one round of conversations, or several.

With dynamic sampling new prompts are sampled until enough groups have rewards that differ. With a
token budget groups that earlier steps began are continued (`r3.rollout.partial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.config import Config
from r3.data.prompts import prompts_from, prompts_of_step
from r3.engine import Engine, Sampling
from r3.metrics.reduce import Mean, Sum
from r3.rollout.collect import Collector, rollout_metrics
from r3.rollout.collected import CollectedRollouts
from r3.rollout.conversation import SuspendedConversation
from r3.rollout.partial import PartialRollouts, assign_engines, from_checkpoint, resumable, to_files
from r3.rollout.scored import Rewards, gather_rewards, require_groups
from r3.rollout.task import Task
from r3.runtime.mesh import Mesh

_DROPPED = "rollout/dropped_by_budget"


class NoSignalError(RuntimeError):
    """Too few groups have rewards that differ: there is nothing to learn from."""


class BudgetError(RuntimeError):
    """Too few conversations finish within `rollout.step_token_budget` to train on."""


@dataclass(frozen=True, kw_only=True)
class StepRollouts:
    """What a step trains on.

    Attributes:
        rollouts: those of this rank's engine.
        rewards: those of all ranks.
        metrics: partials of everything that was sampled.
    """

    rollouts: CollectedRollouts
    rewards: Rewards
    metrics: tuple[dict[str, Any], ...]


class RolloutSource:
    """Gives each step the rollouts that it trains on, and keeps partial rollouts between steps.

    Attributes:
        size: rollouts that this rank's engine samples per step, without refills.
    """

    def __init__(self, engine: Engine, task: Task, config: Config, mesh: Mesh) -> None:
        rollout = config.rollout
        self.size = rollout.prompts_per_step * rollout.group_size // mesh.engine_dp.size
        self._task, self._config, self._mesh = task, config, mesh
        self._is_leader = engine.is_leader
        self._partial = PartialRollouts()
        self._collector = Collector(
            engine=engine,
            mesh=mesh,
            setup=task.conversation_setup,
            scorer=task.scorer,
            sampling=Sampling(
                temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
            ),
            run_seed=config.train.seed,
            samples_per_prompt=rollout.group_size,
            max_response_tokens=rollout.max_response_tokens,
            token_budget=rollout.step_token_budget,
        )

    def collect(self, step: int, on_rollout: Callable[[], None] = lambda: None) -> StepRollouts:
        """Sample and reward the rollouts of `step` with the weights before it.

        All ranks must call. A partial rollout is continued by the next call.

        Args:
            on_rollout: called for each conversation that finishes, is suspended or is dropped.

        Raises:
            NoSignalError: fewer groups have signal than `train.updates_per_step`.
            BudgetError: fewer groups finish within the budget than `train.updates_per_step`.
            DroppedError: fewer groups are left than `train.updates_per_step`.
            EnvironmentFailed, RewardError: see `Collector.collect`.
        """
        if self._config.algo.dynamic_sampling:
            return self._until_signal(step, on_rollout)
        if self._config.rollout.step_token_budget:
            return self._within_budget(step, on_rollout)
        collected = self._round(step, 0, self._config.rollout.prompts_per_step, on_rollout)
        rewards = gather_rewards(collected, self._mesh.world, self._config)
        require_groups(
            rewards,
            step=step,
            sampled=self._config.rollout.prompts_per_step,
            needed=self._config.train.updates_per_step,
        )
        metrics = (collected.metrics, rollout_metrics(collected), rewards.metrics)
        return StepRollouts(rollouts=collected, rewards=rewards, metrics=metrics)

    def state_files(self) -> dict[str, bytes]:
        """Return checkpoint files that hold the partial rollouts of this rank's engine."""
        return to_files(self._partial, self._mesh.engine_dp.rank, is_leader=self._is_leader)

    def restore(self, checkpoint: Path) -> None:
        """Continue with the partial rollouts of a checkpoint folder."""
        if self._config.rollout.step_token_budget:
            self._partial = from_checkpoint(
                checkpoint,
                self._task.prompts.prompts,
                engine=self._mesh.engine_dp.rank,
                engines=self._mesh.engine_dp.size,
                is_leader=self._is_leader,
            )

    def _round(
        self,
        step: int,
        number: int,
        count: int,
        on_rollout: Callable[[], None],
        first_group: int = 0,
    ) -> CollectedRollouts:
        """Sample the first `count` prompts of round `number`."""
        # Each refill takes the prompts in another order; the first round is that of a run without
        # refills.
        prompts = prompts_of_step(
            self._task.prompts,
            seed=self._config.train.seed + (number << 32),
            step=step - 1,
            count=self._config.rollout.prompts_per_step,
        )
        return self._collector.collect(
            prompts[:count],
            policy_version=step - 1,
            seed_step=step,
            first_group=first_group,
            on_rollout=on_rollout,
        )

    def _drop(
        self, suspended: Sequence[SuspendedConversation], kept: Sequence[SuspendedConversation] = ()
    ) -> int:
        """Close the environments of conversations that no step resumes; return their number."""
        dropped = [each for each in suspended if not any(each is other for other in kept)]
        for each in dropped:
            self._task.conversation_setup.environment_calls.discard(each.environment)
        return len(dropped)

    def _until_signal(self, step: int, on_rollout: Callable[[], None]) -> StepRollouts:
        """Sample until enough groups have rewards that differ (DAPO, arXiv 2503.14476, 3.2).

        Groups without signal are left out, and as many new prompts are sampled, for at most
        `algo.dynamic_sampling` further rounds. The prompts of a round depend only on seed, step
        and round, so a resumed run takes the same ones on any layout. If the rounds run out, fewer
        than `rollout.prompts_per_step` groups are trained on.
        """
        config, mesh = self._config, self._mesh
        wanted, sampled = config.rollout.prompts_per_step, 0
        rounds: list[CollectedRollouts] = []
        chosen: list[int] = []
        for number in range(1 + config.algo.dynamic_sampling):
            missing = wanted - len(chosen)
            rounds.append(self._round(step, number, missing, on_rollout, first_group=sampled))
            sampled += missing
            chosen += gather_rewards(rounds[-1], mesh.world, config).groups_with_signal
            if len(chosen) == wanted:
                break
        needed = config.train.updates_per_step
        if len(chosen) < needed:
            raise NoSignalError(
                f"step {step}: {len(chosen)} of {sampled} groups have rewards that differ, after "
                f"{len(rounds)} rounds, and train.updates_per_step = {needed} needs as many "
                "groups.\n  The prompts are all solved or all out of reach. Use other prompts or "
                "raise algo.dynamic_sampling."
            )
        everything = CollectedRollouts.joined(rounds)
        rollouts = everything.of_groups(frozenset(chosen))
        rewards = gather_rewards(rollouts, mesh.world, config)
        counts = {"rounds": len(rounds), "groups_sampled": sampled, "groups_trained": len(chosen)}
        dropped = [
            {_DROPPED: Sum(float(self._drop(each.suspended)))}
            for each in rounds
            if config.rollout.step_token_budget
        ]
        return StepRollouts(
            rollouts=rollouts,
            rewards=rewards,
            metrics=(
                *(each.metrics for each in rounds),
                *dropped,
                rollout_metrics(everything),
                rewards.metrics,
                # The same on all ranks.
                {
                    f"rollout/{name}": Mean(total=float(count), count=1.0)
                    for name, count in counts.items()
                },
            ),
        )

    def _within_budget(self, step: int, on_rollout: Callable[[], None]) -> StepRollouts:
        """Resume partial rollouts, fill up with new prompts, and train on complete groups.

        If too few groups finish for the updates of the step, its conversations get the budget
        again.
        """
        config, mesh, rollout = self._config, self._mesh, self._config.rollout
        gathered = mesh.world.all_gather_object((mesh.engine_dp.rank, self._partial.groups))
        waiting = sorted(group for _, groups in gathered for group in groups)
        partial = self._partial.renumbered({group: i for i, group in enumerate(waiting)})
        loads = [0] * mesh.engine_dp.size
        for engine, groups in gathered:
            loads[engine] += len(groups)
        count = rollout.prompts_per_step - len(waiting)
        prompts = prompts_from(
            self._task.prompts, seed=config.train.seed, start=partial.prompts_taken, count=count
        )
        engines = assign_engines(loads, count)
        indices = [i for i, engine in enumerate(engines) if engine == mesh.engine_dp.rank]
        suspended, rounds, dropped = partial.suspended, [partial.finished], 0
        while True:
            collected = self._collector.collect(
                prompts,
                policy_version=step - 1,
                seed_step=step,
                first_group=len(waiting),
                prompt_indices=indices,
                resumed=suspended,
                on_rollout=on_rollout,
            )
            rounds.append(collected)
            suspended = resumable(
                collected.suspended, step=step, max_staleness=rollout.max_staleness
            )
            dropped += self._drop(collected.suspended, suspended)
            finished = CollectedRollouts.joined(rounds)
            remaining = PartialRollouts(
                suspended=suspended, finished=finished, prompts_taken=partial.prompts_taken + count
            )
            states = mesh.world.all_gather_object(
                ({each.group for each in finished.rollouts}, remaining.groups)
            )
            unfinished = {group for _, groups in states for group in groups}
            complete = {group for groups, _ in states for group in groups} - unfinished
            if len(complete) >= config.train.updates_per_step:
                break
            if not unfinished:
                raise BudgetError(
                    f"step {step}: {len(complete)} groups finished within "
                    f"rollout.step_token_budget = {rollout.step_token_budget} tokens, and "
                    f"train.updates_per_step = {config.train.updates_per_step} needs as many "
                    "groups.\n  Raise the budget, or set rollout.max_staleness above 0 so that "
                    "later steps continue the conversations."
                )
            prompts, indices = [], []
        self._partial = replace(remaining, finished=finished.of_groups(frozenset(remaining.groups)))
        rollouts = finished.of_groups(frozenset(complete)).in_order()
        rewards = gather_rewards(rollouts, mesh.world, config)
        stale = sum(each.num_stale_tokens(step - 1) for each in rollouts.rollouts)
        sampled = sum(each.num_response_tokens for each in rollouts.rollouts)
        return StepRollouts(
            rollouts=rollouts,
            rewards=rewards,
            metrics=(
                *(each.metrics for each in rounds),
                rollout_metrics(rollouts),
                rewards.metrics,
                {
                    "rollout/carried": Sum(float(len(suspended))),
                    _DROPPED: Sum(float(dropped)),
                    "rollout/stale_tokens_frac": Mean(total=float(stale), count=float(sampled)),
                },
            ),
        )
