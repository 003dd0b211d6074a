"""The samples that a step trains on: one round of conversations, or several.

With dynamic sampling new prompts are sampled until enough groups have signal. With a
token budget groups that earlier steps began are continued (`r3.partial`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from r3 import extras
from r3.algo.advantage import Reward
from r3.algo.sums import are_equal
from r3.config import Config
from r3.data.prompts import run_prompts, step_prompts
from r3.engine import Engine, Sampling
from r3.errors import Explained
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean
from r3.rollout.collect import Collector, is_cut, limit_notes, rollout_metrics
from r3.rollout.round import RoundResult
from r3.rollout.step_rewards import (
    gather_rewards,
    groups_of,
    groups_with_loss,
    groups_with_signal,
    require_groups,
    reward_metrics,
)
from r3.rollout.task import Task
from r3.routing.ledger import constant_layers
from r3.runtime.mesh import Mesh
from r3.runtime.terminal import say
from r3.types import Prompt, Rollout, Sample

_TAKEN = "prompts_taken.json"  # in checkpoints of runs with dynamic sampling
_MANY_STEPS = 10  # steps in a row without signal after which the warning is repeated


class NoSignalError(Explained):
    """Too few groups have signal: there is nothing to learn from."""


class BudgetError(Explained):
    """Too few conversations finish within `rollout.step_token_budget` to train on."""


Collected = tuple[list[Sample], list[Reward], tuple[dict[str, Any], ...]]
"""What a step trains on: the samples of this rank's engine, the rewards of all ranks, and partials
of everything that was sampled."""


def rollout_source(engine: Engine, task: Task, config: Config, mesh: Mesh) -> RolloutSource:
    """Return what gives each step its samples."""
    kind = extras.partial_source() if config.rollout.step_token_budget else RolloutSource
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
        self._is_leader = engine.is_leader
        self._prompts_taken = 0  # with dynamic sampling, on all ranks
        self._flat_steps, self._said_flat = 0, False
        self._said_limits: set[str] = set()
        self._said_constant = False
        self._most_dropped = 0  # samples of one step
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

    def collect(self, step: int, on_rollout: Callable[[], None] = lambda: None) -> Collected:
        """Sample and reward the rollouts of `step` with the weights before it.

        All ranks must call.

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
        collected = self._one_step(step, on_rollout)
        self._warn_without_signal(step, collected[1])
        return collected

    def _routes(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Count layers that sent all tokens of the step to the same experts; say it once."""
        if not self._config.captures or not self._task.shape.moe_layers:
            return {}
        found = constant_layers(
            rollouts, self._mesh.world, num_experts=self._task.shape.num_experts
        )
        if self._mesh.world.rank:
            return {}
        if found and not self._said_constant:
            self._said_constant = True
            index, experts = found[0]
            layer, others = self._task.shape.moe_layers[index], len(found) - 1
            say(
                f"step {step}: layer {layer} sent all tokens of all rollouts to experts {experts}"
                f"{f', and so did {others} more' if others else ''}. The router "
                f"collapsed, or the capture of the layer does not work: if "
                f"routing/agreement_layer/{layer} is near 1, the policy's own router agrees",
                error=True,
            )
        return {"routing/constant_layers": Mean(float(len(found)), 1.0)}

    def state_dict(self) -> dict[str, bytes]:
        """Return the place in the data, with dynamic sampling, as a file of this rank by name."""
        if self._mesh.world.rank or not self._config.algo.dynamic_sampling:
            return {}
        return {_TAKEN: json.dumps({"prompts_taken": self._prompts_taken}).encode()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from the place in the data of a checkpoint: its files by name."""
        if _TAKEN in state:
            self._prompts_taken = int(json.loads(state[_TAKEN])["prompts_taken"])

    def _warn_without_signal(self, step: int, rewards: Sequence[Reward]) -> None:
        """Say once that a step had no signal, and again when it stays so."""
        algo = self._config.algo
        if self._config.has_teacher or self._config.train.objective != "rl":
            return
        # Others compare the rewards of the whole step, and a user's function may.
        in_groups = algo.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        flat = not groups_with_signal(rewards)
        if not in_groups:
            shaped = [each.shaped for each in rewards]
            flat = not any(each.has_loss for each in rewards) or are_equal(shaped)
        self._flat_steps = self._flat_steps + 1 if flat else 0
        again = self._flat_steps % _MANY_STEPS == 0
        if not flat or (self._said_flat and not again) or self._mesh.world.rank:
            return
        self._said_flat = True
        since = f", as in the {self._flat_steps - 1} steps before" if again else ""
        groups = len(groups_of(rewards))
        say(
            f"step {step}: all {groups} groups have equal rewards{since}: rewards taught nothing. "
            "The questions are all solved or all out of reach, or the reward function gives one "
            "value. See reward/group_zero_std_frac, the samples (python -m r3.show), and "
            "algo.dynamic_sampling",
            error=True,
        )

    def _say_dropped(self, step: int, collected: RoundResult) -> str:
        """Say how many samples were dropped and why the first was, if more than before were.

        All ranks must call.

        Returns:
            Why the first one was dropped; "" if none was.
        """
        if self._config.env.on_error == self._config.reward.on_error == "stop":
            return ""
        world = self._mesh.world
        dropped = [each for part in world.all_gather_object(collected.dropped) for each in part]
        if len(dropped) >= 2 * self._most_dropped + 1:
            self._most_dropped = len(dropped)
            if world.rank == 0:
                text = f"step {step}: {len(dropped)} samples were dropped. The first: {dropped[0]}"
                say(text, error=True)
        return dropped[0] if dropped else ""

    def _one_step(self, step: int, on_rollout: Callable[[], None]) -> Collected:
        """Sample the prompts of the step, and train on all of them."""
        config, prompts = self._config, step_prompts(self._task.prompts, self._config, step)
        collected, failure = self._round(step, prompts, on_rollout)
        rewards = gather_rewards(collected.samples, self._mesh.world, config)
        needed = config.train.updates_per_step
        require_groups(rewards, step=step, sampled=len(prompts), needed=needed, failure=failure)
        return self._made(step, [collected], collected.samples, rewards)

    def _warn_of_limits(self, step: int, collected: RoundResult) -> None:
        """Say once that no response ended, and once per cause that requests were refused.

        All ranks must call.
        """
        setup, world = self._task.conversation_setup, self._mesh.world
        cut = [is_cut(each, setup) for each in collected.rollouts]
        refused = Counter(
            {
                cause: int(collected.metrics[name].value)
                for cause, name in REFUSED.items()
                if name in collected.metrics
            }
        )
        everybody = world.all_gather_object((cut, refused))
        cut = [each for part, _ in everybody for each in part]
        counts = sum((part for _, part in everybody), Counter[str]())
        limit = f"rollout.max_response_tokens {self._config.rollout.max_response_tokens}"
        notes = limit_notes(cut, counts, self._said_limits, limit, setup)
        for note in notes if world.rank == 0 else ():
            say(f"step {step}: {note}", error=True)

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
            *(each.metrics for each in rounds),
            rollout_metrics(sampled),
            *map(reward_metrics, reported),
            self._routes(step, [each.rollout for each in sampled]),
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
        self._warn_of_limits(step, collected)
        return collected, self._say_dropped(step, collected)

    def _until_signal(self, step: int, on_rollout: Callable[[], None]) -> Collected:
        """Sample until enough groups have signal (DAPO, arXiv 2503.14476, 3.2).

        Groups without signal are left out, and as many new prompts are sampled, for at most
        `algo.dynamic_sampling` further rounds. Each round takes the next prompts of the epoch, so
        nothing repeats before all were drawn. How many were drawn is part of the checkpoint. If the
        rounds run out, fewer than `rollout.prompts_per_step` groups are trained on.
        """
        config, mesh = self._config, self._mesh
        wanted, sampled = config.rollout.prompts_per_step, 0
        taken = self._prompts_taken
        rounds: list[RoundResult] = []
        gathered: list[list[Reward]] = []
        chosen: list[int] = []
        for _ in range(1 + config.algo.dynamic_sampling):
            missing = wanted - len(chosen)
            prompts = run_prompts(self._task.prompts, config, taken + sampled, missing)
            collected, _ = self._round(step, prompts, on_rollout, first_group=sampled)
            rounds.append(collected)
            gathered.append(gather_rewards(collected.samples, mesh.world, config))
            sampled += missing
            teaches = groups_with_loss if config.has_teacher else groups_with_signal
            chosen += teaches(gathered[-1])
            if len(chosen) == wanted:
                break
        self._prompts_taken = taken + sampled
        needed = config.train.updates_per_step
        if len(chosen) < needed:
            raise NoSignalError(
                f"step {step}: {len(chosen)} of {sampled} groups have signal "
                f"(algo.dynamic_sampling_metric {config.algo.dynamic_sampling_metric}), after "
                f"{len(rounds)} rounds, and train.updates_per_step = {needed} needs as many "
                "groups.\n  The prompts are all solved or all out of reach. Use other prompts or "
                "raise algo.dynamic_sampling."
            )
        everything = [sample for each in rounds for sample in each.samples]
        samples = [each for each in everything if each.rollout.group in chosen]
        rewards = gather_rewards(samples, mesh.world, config)
        counts = {"rounds": len(rounds), "groups_sampled": sampled, "groups_trained": len(chosen)}
        # The same on all ranks.
        of_step = {
            f"rollout/{name}": Mean(total=float(count), count=1.0) for name, count in counts.items()
        }
        # Metrics are of everything that was sampled.
        return self._made(
            step, rounds, samples, rewards, of_step, sampled=everything, gathered=gathered
        )
