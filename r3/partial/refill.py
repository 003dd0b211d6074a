"""Rounds of a step with dynamic sampling: prompts are sampled until enough groups have signal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from r3.algo.advantage import Reward
from r3.metrics.reduce import Mean
from r3.rollout.round import RoundResult
from r3.rollout.step import Collected, NoSignalError, RolloutSource
from r3.rollout.step_rewards import gather_rewards, groups_with_loss, groups_with_signal

_TAKEN = "prompts_taken.json"  # in checkpoints


class RefillingSource(RolloutSource):
    """Gives each step the samples of groups with signal (`algo.dynamic_sampling`)."""

    _prompts_taken = 0  # on all ranks

    def state_dict(self) -> dict[str, bytes]:
        """Return the place in the data, as a file of this rank by name."""
        if self._mesh.world.rank or not self._config.algo.dynamic_sampling:
            return {}
        return {_TAKEN: json.dumps({"prompts_taken": self._prompts_taken}).encode()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from the place in the data of a checkpoint: its files by name."""
        if _TAKEN in state:
            self._prompts_taken = int(json.loads(state[_TAKEN])["prompts_taken"])

    def _one_step(self, step: int, on_rollout: Callable[[], None]) -> Collected:
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
            prompts = self._prompts(taken + sampled, missing)
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
        everything = [sample for part in rounds for sample in part.samples]
        samples = [sample for sample in everything if sample.rollout.group in chosen]
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
