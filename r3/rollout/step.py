"""The rollouts that a step trains on: one round of conversations, or several.

With dynamic sampling new prompts are sampled until enough groups have signal. With a
token budget groups that earlier steps began are continued (`r3.rollout.partial`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3.algo.sums import are_equal
from r3.config import Config
from r3.data.prompts import prompts_from, prompts_of_step
from r3.engine import Engine, Sampling
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean, Sum
from r3.rollout.collect import Collector, is_cut, limit_notes, rollout_metrics
from r3.rollout.collected_rollouts import CollectedRollouts
from r3.rollout.conversation import SuspendedConversation
from r3.rollout.partial import PartialRollouts, assign_engines, from_checkpoint, resumable, to_files
from r3.rollout.scored import Rewards, gather_rewards, require_groups
from r3.rollout.task import Task
from r3.routing.ledger import constant_layers
from r3.runtime.mesh import Mesh
from r3.runtime.terminal import say
from r3.types import Prompt

_DROPPED = "rollout/dropped_by_budget"
_TAKEN = "prompts_taken.json"  # in checkpoints of runs with dynamic sampling
_MANY_STEPS = 10  # steps in a row without signal after which the warning is repeated


class NoSignalError(RuntimeError):
    """Too few groups have signal: there is nothing to learn from."""


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
            made = self._within_budget(step, on_rollout)
        else:
            made = self._one_round(step, on_rollout)
        self._warn_without_signal(step, made.rewards)
        return made

    def _routes(self, step: int, rollouts: CollectedRollouts) -> dict[str, Any]:
        """Count layers that sent all tokens of the step to the same experts; say it once."""
        if self._config.replay.mode != "r3" or not self._task.shape.moe_layers:
            return {}
        found = constant_layers(
            rollouts.rollouts, self._mesh.world, num_experts=self._task.shape.num_experts
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

    def state_files(self) -> dict[str, bytes]:
        """Return checkpoint files of this rank: partial rollouts, or the place in the data."""
        if self._config.algo.dynamic_sampling:
            taken = json.dumps({"prompts_taken": self._prompts_taken}).encode()
            return {} if self._mesh.world.rank else {_TAKEN: taken}
        return to_files(self._partial, self._mesh.engine_dp.rank, is_leader=self._is_leader)

    def restore(self, checkpoint: Path) -> None:
        """Continue with the partial rollouts and the place in the data of a checkpoint folder."""
        if (file := checkpoint / _TAKEN).exists():
            self._prompts_taken = int(json.loads(file.read_bytes())["prompts_taken"])
        if self._config.rollout.step_token_budget:
            self._partial = from_checkpoint(
                checkpoint,
                engine=self._mesh.engine_dp.rank,
                engines=self._mesh.engine_dp.size,
                is_leader=self._is_leader,
            )

    def _warn_without_signal(self, step: int, rewards: Rewards) -> None:
        """Say once that a step had no signal, and again when it stays so."""
        algo, train = self._config.algo, self._config.train
        if algo.teacher or train.objective != "rl":
            return
        # Others compare the rewards of the whole step, and a user's function may.
        in_groups = algo.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        flat = not rewards.groups_with_signal
        if not in_groups:
            flat = not bool(rewards.trains_R.any()) or are_equal(rewards.rewards_R.tolist())
        self._flat_steps = self._flat_steps + 1 if flat else 0
        again = self._flat_steps % _MANY_STEPS == 0
        if not flat or (self._said_flat and not again) or self._mesh.world.rank:
            return
        self._said_flat = True
        since = f", as in the {self._flat_steps - 1} steps before" if again else ""
        groups = len(rewards.groups_R.unique())
        say(
            f"step {step}: all {groups} groups have equal rewards{since}: rewards taught nothing. "
            "The questions are all solved or all out of reach, or the reward function gives one "
            "value. See reward/group_zero_std_frac, the samples (python -m r3.show), and "
            "algo.dynamic_sampling",
            error=True,
        )

    def _say_dropped(self, step: int, collected: CollectedRollouts) -> str:
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

    def _one_round(self, step: int, on_rollout: Callable[[], None]) -> StepRollouts:
        """Sample the prompts of the step, and train on all of them."""
        config, count = self._config, self._config.rollout.prompts_per_step
        prompts = prompts_of_step(
            self._task.prompts, seed=config.train.seed, step=step - 1, count=count
        )
        collected, failure = self._round(step, prompts, on_rollout)
        rewards = gather_rewards(collected, self._mesh.world, config)
        needed = config.train.updates_per_step
        require_groups(rewards, step=step, sampled=count, needed=needed, failure=failure)
        return self._made(step, [collected], collected, rewards)

    def _warn_of_limits(self, step: int, collected: CollectedRollouts) -> None:
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
        rounds: Sequence[CollectedRollouts],
        rollouts: CollectedRollouts,
        rewards: Rewards,
        *more: dict[str, Any],
        sampled: CollectedRollouts | None = None,
        gathered: Sequence[Rewards] = (),
    ) -> StepRollouts:
        """Put together what a step trains on, with metrics. All ranks must call.

        Args:
            more: further partials.
            sampled: the rollouts of which metrics tell; None: those that are trained on.
            gathered: their rewards, one for each round.
        """
        sampled = sampled or rollouts
        # All ranks have the rewards, and one reports them.
        reported = () if self._mesh.world.rank else gathered or (rewards,)
        metrics = (
            *(each.metrics for each in rounds),
            rollout_metrics(sampled),
            *(each.metrics for each in reported),
            self._routes(step, sampled),
            *more,
        )
        return StepRollouts(rollouts=rollouts, rewards=rewards, metrics=metrics)

    def _round(
        self, step: int, prompts: Sequence[Prompt], on_rollout: Callable[[], None], **where: Any
    ) -> tuple[CollectedRollouts, str]:
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

    def _drop(
        self, suspended: Sequence[SuspendedConversation], kept: Sequence[SuspendedConversation] = ()
    ) -> int:
        """Close the environments of conversations that no step resumes; return their number."""
        dropped = [each for each in suspended if not any(each is other for other in kept)]
        for each in dropped:
            self._task.conversation_setup.environment_calls.discard(each.environment)
        return len(dropped)

    def _until_signal(self, step: int, on_rollout: Callable[[], None]) -> StepRollouts:
        """Sample until enough groups have signal (DAPO, arXiv 2503.14476, 3.2).

        Groups without signal are left out, and as many new prompts are sampled, for at most
        `algo.dynamic_sampling` further rounds. Each round takes the next prompts of the epoch, so
        nothing repeats before all were drawn. How many were drawn is part of the checkpoint. If the
        rounds run out, fewer than `rollout.prompts_per_step` groups are trained on.
        """
        config, mesh = self._config, self._mesh
        wanted, sampled = config.rollout.prompts_per_step, 0
        taken = self._prompts_taken
        rounds: list[CollectedRollouts] = []
        gathered: list[Rewards] = []
        chosen: list[int] = []
        for _ in range(1 + config.algo.dynamic_sampling):
            missing = wanted - len(chosen)
            prompts = prompts_from(
                self._task.prompts, seed=config.train.seed, start=taken + sampled, count=missing
            )
            collected, _ = self._round(step, prompts, on_rollout, first_group=sampled)
            rounds.append(collected)
            gathered.append(gather_rewards(collected, mesh.world, config))
            sampled += missing
            found = gathered[-1]
            chosen += found.groups_with_loss if config.algo.teacher else found.groups_with_signal
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
        everything = CollectedRollouts.joined(rounds)
        rollouts = everything.of_groups(frozenset(chosen))
        rewards = gather_rewards(rollouts, mesh.world, config)
        counts = {"rounds": len(rounds), "groups_sampled": sampled, "groups_trained": len(chosen)}
        dropped = [
            {_DROPPED: Sum(float(self._drop(each.suspended)))}
            for each in rounds
            if config.rollout.step_token_budget
        ]
        # The same on all ranks.
        of_step = {
            f"rollout/{name}": Mean(total=float(count), count=1.0) for name, count in counts.items()
        }
        # Metrics are of everything that was sampled.
        return self._made(
            step,
            rounds,
            rollouts,
            rewards,
            *dropped,
            of_step,
            sampled=everything,
            gathered=gathered,
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
            collected, _ = self._round(
                step,
                prompts,
                on_rollout,
                first_group=len(waiting),
                prompt_indices=indices,
                resumed=suspended,
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
        of_step = {
            "rollout/carried": Sum(float(len(suspended))),
            _DROPPED: Sum(float(dropped)),
            "rollout/stale_tokens_frac": Mean(total=float(stale), count=float(sampled)),
        }
        return self._made(step, rounds, rollouts, rewards, of_step)
