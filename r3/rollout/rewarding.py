"""The rewards of one round, on the leader rank of an engine: from environments, workflows and
reward functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from r3.metrics.reduce import Mean, Sum
from r3.rewards.scorer import RewardResult, Scorer
from r3.types import Prompt, Rollout

# Where rewards come from, by the name of the metric.
_SOURCES = {"by_environment": "environment", "by_function": "function", "unfinished": "unfinished"}

# Counters that environments and reward functions share.
CALL_COUNTS = ("calls", "errors", "timeouts", "crashes", "retries")


class Rewarding:
    """Rewards each conversation or episode when it is over, while others are sampled."""

    def __init__(
        self,
        scorer: Scorer,
        groups: Sequence[int],
        *,
        unfinished_reward: float,
        keep_failed: bool,
    ) -> None:
        """Expect the conversations of a round.

        Args:
            groups: group of every conversation of the round.
            unfinished_reward: reward of one that a limit ended without a reward.
            keep_failed: whether those whose functions failed stay, with reward 0, whatever
                `reward.on_error` says.
        """
        self._scorer = scorer
        self._unfinished_reward, self._keep_failed = unfinished_reward, keep_failed
        # Conversations of each group that may still be submitted to the scorer.
        self._open = Counter(groups)
        self._rollouts: dict[int, tuple[Rollout, ...]] = {}
        self._rewards: dict[int, tuple[float, ...]] = {}
        self._results: dict[int, RewardResult] = {}
        self._sources: Counter[str] = Counter()
        self._num_failed = 0

    @property
    def outstanding(self) -> int:
        """Conversations that reward functions have not scored yet."""
        return self._scorer.outstanding

    def fail(self, key: int, rollouts: Sequence[Rollout]) -> None:
        """Give 0 to a conversation that failed and is trained on."""
        self._rollouts[key], self._rewards[key] = tuple(rollouts), (0.0,) * len(rollouts)
        self._num_failed += 1

    def reward_each(self, key: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        """Take rewards that a workflow gave to each sequence of an episode."""
        self._rollouts[key], self._rewards[key] = tuple(rollouts), tuple(rewards)
        self._sources["environment"] += 1

    def reward(
        self,
        key: int,
        rollouts: Sequence[Rollout],
        prompt: Prompt,
        *,
        given: float | None,
        finished: bool,
    ) -> bool:
        """Reward a conversation that is over; return False if reward functions must be awaited.

        The environment's reward comes before reward functions, unless it is one of their
        components. Functions score the last sequence, and do not score a conversation that its
        environment did not end: its last message answers nothing.

        Args:
            given: reward of the environment or the workflow; None if it gave none.
            finished: whether the environment or the workflow ended it, not a limit.
        """
        scorer = self._scorer
        self._rollouts[key] = tuple(rollouts)
        reward = given
        if reward is not None:
            self._sources["environment"] += 1
        elif not finished:
            self._sources["unfinished"] += 1
            reward = self._unfinished_reward
        if reward is None or (scorer.uses_environment and len(scorer.components) > 1):
            self._sources["function"] += 1
        if reward is None or scorer.uses_environment:
            scorer.submit(key, rollouts[-1], prompt, environment_reward=reward)
            return False
        self._rewards[key] = (reward,) * len(rollouts)
        return True

    def leave(self, group: int) -> None:
        """One conversation of a group fewer may still be submitted."""
        self._open[group] -= 1
        if not self._open[group]:
            self._scorer.complete_group(group)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take results of reward functions; return their number.

        Raises:
            RewardError: a function failed and `reward.on_error` is "stop".
        """
        results = self._scorer.poll(timeout_s)
        for result in results:
            key = cast("int", result.key)
            *others, last = self._rollouts[key]
            if result.metrics:
                last = replace(last, metrics={**last.metrics, **result.metrics})
            self._rollouts[key] = (*others, last)
            self._rewards[key] = (result.reward,) * len(self._rollouts[key])
            self._results[key] = result
        return len(results)

    def collected(self) -> tuple[list[Rollout], list[float], dict[tuple[int, int], Any]]:
        """Return all rollouts, their rewards, and the parts of those that functions scored."""
        dropped = self._dropped_keys
        keys = [key for key in sorted(self._rollouts) if key not in dropped]
        names = {key: (each[0].group, each[0].sample_index) for key, each in self._rollouts.items()}
        return (
            [rollout for key in keys for rollout in self._rollouts[key]],
            [reward for key in keys for reward in self._rewards[key]],
            {names[key]: self._results[key].parts for key in keys if key in self._results},
        )

    @property
    def _dropped_keys(self) -> list[int]:
        if self._scorer.on_error != "drop" or self._keep_failed:
            return []
        return [key for key, result in self._results.items() if result.failure]

    @property
    def dropped(self) -> list[str]:
        """Why conversations were left out, each with its name."""
        named = [(self._rollouts[key][-1], self._results[key]) for key in self._dropped_keys]
        return [
            f"prompt {rollout.prompt_id}, sample {rollout.sample_index}: {result.failure}"
            for rollout, result in named
        ]

    def source_metrics(self) -> dict[str, Any]:
        """Partials of who gave the rewards."""
        count = float(len(self._rollouts) - self._num_failed)
        return {
            f"reward/{name}_frac": Mean(total=float(self._sources[source]), count=count)
            for name, source in _SOURCES.items()
        }

    def scoring_metrics(self) -> dict[str, Any]:
        """Partials of what scoring took; none if every component is quick and nothing failed."""
        scorer, results = self._scorer, self._results
        counts = scorer.take_counts()
        failed = float(sum(bool(result.failure) for result in results.values()))
        unreported = float(sum(bool(result.unreported) for result in results.values()))
        if scorer.quick and not failed and not unreported:
            return {}
        dropped = failed if scorer.on_error == "drop" and not self._keep_failed else 0.0
        return {
            "time/judge_mean_s": Mean(
                total=sum(result.seconds for result in results.values()), count=float(len(results))
            ),
            "reward/dropped": Sum(value=dropped),
            "reward/zeroed": Sum(value=failed - dropped),
            "reward/unreported": Sum(value=unreported),
            **{f"reward/{name}": Sum(value=float(counts[name])) for name in CALL_COUNTS},
        }
