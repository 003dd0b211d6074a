"""The samples that a step trains on: one round of conversations (`r3.partial` has others)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from r3 import extras
from r3.algo.advantage import Reward
from r3.config import Config
from r3.data.prompts import run_prompts
from r3.engine import Engine, Sampling
from r3.errors import Explained
from r3.rollout.collect import Collector, rollout_metrics
from r3.rollout.round import RoundResult
from r3.rollout.step_rewards import gather_rewards, require_groups, reward_metrics
from r3.rollout.task import Task
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Sample


class NoSignalError(Explained):
    """Too few groups have signal: there is nothing to learn from."""


class BudgetError(Explained):
    """Too few conversations finish within `rollout.step_token_budget` to train on."""


Collected = tuple[list[Sample], list[Reward], tuple[dict[str, Any], ...]]
"""What a step trains on: the samples of this rank's engine, the rewards of all ranks, and partials
of everything that was sampled."""


def rollout_source(engine: Engine, task: Task, config: Config, mesh: Mesh) -> RolloutSource:
    """Return what gives each step its samples."""
    kind = extras.source_of_rounds(config) if config.has_rounds else RolloutSource
    if config.data.is_followed:
        kind = extras.mixture().followed(kind)
    return kind(engine, task, config, mesh)


class RolloutSource:
    """Gives each step the samples that it trains on.

    Attributes:
        size: rollouts that this rank's engine samples per step, without refills.
    """

    def __init__(self, engine: Engine, task: Task, config: Config, mesh: Mesh) -> None:
        rollout = config.rollout
        self.size = rollout.samples_per_step // mesh.engine_dp.size
        self._task, self._config, self._mesh = task, config, mesh
        self._notes = extras.step_notes(task, config, mesh)
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
            max_response_tokens=config.response_tokens(),
            token_budget=rollout.step_token_budget,
        )

    def collect(self, step: int, on_rollout: Callable[[], None] = lambda: None) -> Collected:
        """Sample and reward the rollouts of `step` with the weights before it.

        All ranks must call.

        Args:
            on_rollout: called for each conversation that finishes, is suspended or is dropped.

        Raises:
            NoSignalError: fewer groups have signal than the step makes updates.
            BudgetError: fewer groups finish within the budget than the step makes updates.
            DroppedError: fewer groups are left than the step makes updates.
            EnvironmentFailed, RewardError: see `Collector.collect`.
        """
        collected = self._one_step(step, on_rollout)
        self._notes.signal(step, collected[1])
        return collected

    def state_dict(self) -> dict[str, bytes]:
        """Return what a checkpoint needs of it, as files of this rank by name: nothing here."""
        return {}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from the files of a checkpoint by name."""

    def _prompts(self, start: int, count: int) -> list[Prompt]:
        """Return the next prompts, of which the steps so far took `start`."""
        return run_prompts(self._task.prompts, self._config, start, count)

    def _one_step(self, step: int, on_rollout: Callable[[], None]) -> Collected:
        """Sample the prompts of the step, and train on all of them."""
        config, count = self._config, self._config.rollout.prompts_per_step
        prompts = self._prompts((step - 1) * count, count)
        collected, failure = self._round(step, prompts, on_rollout)
        rewards = gather_rewards(collected.samples, self._mesh.world, config)
        require_groups(rewards, config, step=step, sampled=len(prompts), failure=failure)
        return self._made(step, [collected], collected.samples, rewards)

    def _made(
        self,
        step: int,
        rounds: Sequence[RoundResult],
        samples: list[Sample],
        rewards: list[Reward],
        *more: dict[str, Any],
        sampled: Sequence[Sample] | None = None,
        gathered: Sequence[list[Reward]] = (),
    ) -> Collected:
        """Put together what a step trains on, with metrics. All ranks must call.

        Args:
            more: further partials.
            sampled: the samples of which metrics tell; None: those that are trained on.
            gathered: their rewards, one list per round.
        """
        sampled = samples if sampled is None else sampled
        # All ranks have the rewards, and one reports them.
        reported = () if self._mesh.world.rank else gathered or (rewards,)
        metrics = (
            *(part.metrics for part in rounds),
            rollout_metrics(sampled),
            *(reward_metrics(each, self._config) for each in reported),
            self._notes.routes(step, [sample.rollout for sample in sampled]),
            *more,
        )
        return samples, rewards, metrics

    def _round(
        self, step: int, prompts: Sequence[Prompt], on_rollout: Callable[[], None], **where: Any
    ) -> tuple[RoundResult, str]:
        """Sample responses to prompts.

        Args:
            where: further arguments of `Collector.collect`.

        Returns:
            What was collected, and why the first dropped sample was dropped; "" if none was.
        """
        collected = self._collector.collect(
            prompts, policy_version=step - 1, seed_step=step, on_rollout=on_rollout, **where
        )
        self._notes.limits(step, collected)
        return collected, self._notes.dropped(step, collected)
