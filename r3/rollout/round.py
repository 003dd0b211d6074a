"""One round of episodes: all in flight at once, each rewarded while others are sampled."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from r3 import extras
from r3.engine import Sampled, Turn
from r3.metrics.glossary import REFUSED
from r3.metrics.reduce import Mean, Sum
from r3.rewards.scorer import RewardResult, Scorer
from r3.rollout.conversation_setup import ConversationRules, EnvironmentFailed
from r3.rollout.episode import Call, EnvironmentEpisode, Episode
from r3.runtime.terminal import say
from r3.types import Prompt, Rollout, Sample

# Longest wait for users' code while the engine is idle. The ranks of an engine synchronise after
# it.
_IDLE_WAIT_S = 1.0
# The same while both environments and reward functions are waited for, which are polled in turn.
_POLL_INTERVAL_S = 0.01
# Counters that environments and reward functions share.
_CALL_COUNTS = ("calls", "errors", "timeouts", "crashes", "retries")


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round gave on this rank; empty on ranks that are not the leader of their engine.

    Attributes:
        samples: in order of group and sample. Groups are complete, except for conversations whose
            environment or reward failed (`env.on_error`, `reward.on_error` "drop").
        metrics: partials of the conversations themselves.
        suspended: conversations that the token budget interrupted (`r3.partial`).
        dropped: why conversations were left out, each with its name.
    """

    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    suspended: tuple[Any, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def rollouts(self) -> list[Rollout]:
        """Those of the samples."""
        return [sample.rollout for sample in self.samples]


class Round:
    """The episodes of one round, on the leader rank of an engine.

    The caller samples the turns that `advance` returns and passes them to `receive_sample`.

    Attributes:
        episodes: by key, those that are resumed first.
        keys: numbers turns; rounds that share an engine share it.
    """

    def __init__(
        self,
        rules: ConversationRules,
        scorer: Scorer,
        prompts: Mapping[int, Prompt],
        *,
        seed_step: int,
        samples_per_prompt: int,
        resumed: Sequence[Any] = (),
    ) -> None:
        """Begin all episodes.

        Args:
            prompts: group -> prompt.
            seed_step: step that names the random streams of new episodes.

        Raises:
            EnvironmentFailed: an environment cannot be restored and `env.on_error` is "stop".
        """
        self._rules, self._scorer = rules, scorer
        self._environments = rules.setup.environments
        assert not (rules.token_budget and scorer.scores_groups), (
            f"a token budget of {rules.token_budget} suspends samples that are scored together"
        )
        # Calls for the engine, and errors that end the round, also from the event loop.
        self._calls: queue.SimpleQueue[Call | Exception] = queue.SimpleQueue()
        self._in_flight: dict[int, Call] = {}
        self._awaiting: dict[int, list[Rollout]] = {}  # by episode: reward functions have them
        self.keys = itertools.count()
        self.episodes: list[Any] = []  # `Episode`s
        self._num_over = 0  # episodes that ended or were suspended since the last `advance`
        self._dropped: list[str] = []
        samples = [(group, index) for group in prompts for index in range(samples_per_prompt)]
        # Episodes of each group that may still be submitted to the scorer.
        self._open = Counter([*(each.rollout.group for each in resumed), *(g for g, _ in samples)])
        self._sources: Counter[str] = Counter()  # of rewards
        for suspended in resumed:
            rollout, origin = suspended.rollout, suspended.progress.seed_origin
            episode = self._add(suspended.prompt, rollout.group, rollout.sample_index, origin)
            episode.resume(suspended)
            self._num_over += bool(episode.outcome) and self._settle(episode)
        for group, sample_index in samples:
            self._add(prompts[group], group, sample_index, (seed_step, group)).open()

    @property
    def size(self) -> int:
        """Number of its episodes."""
        return len(self.episodes)

    def advance(self, engine_busy: bool) -> tuple[list[Turn], int]:
        """Take what environments, workflows and reward functions returned.

        Waits for them only while the engine has nothing to do.

        Returns:
            Turns to sample, and the number of episodes that are over or suspended.

        Raises:
            EnvironmentFailed: an environment or a workflow failed and `env.on_error` is "stop", or
                a workflow blocks the event loop.
            FloatingPointError, RouteError: see `Transcript.append_sample`.
            RewardError: a reward function failed and `reward.on_error` is "stop".
        """
        environments, scorer, calls = self._environments, self._scorer, self._calls
        if environments.is_workflow and (where := environments.blocked()):
            raise EnvironmentFailed(
                f"a workflow blocked the event loop for {environments.settings.timeout_s:g} s "
                f"(env.timeout_s), so that no episode could go on:\n{where}"
                "  Await what takes time: await asyncio.to_thread(function)"
            )
        both = scorer.outstanding and environments.outstanding
        wait_s = _POLL_INTERVAL_S if both else _IDLE_WAIT_S
        finished, self._num_over = self._num_over, 0
        for report in environments.poll(0.0 if engine_busy or not calls.empty() else wait_s):
            episode = self.episodes[cast("int", report.key)]
            episode.receive(report)
            if episode.outcome:
                finished += episode.is_suspended or self._settle(episode)
        turns = []
        while not calls.empty():
            call = calls.get()
            if isinstance(call, Exception):
                raise call
            if not call.is_abandoned:
                turns.append(call.turn(next(self.keys)))
                self._in_flight[turns[-1].key] = call
        for result in scorer.poll(0.0 if engine_busy or turns or finished else wait_s):
            self._take(result)
            finished += 1
        return turns, finished

    def take_abandoned(self) -> list[int]:
        """Return the turns in flight that nobody awaits any more; they are not received."""
        keys = [key for key, call in self._in_flight.items() if call.is_abandoned]
        for key in keys:
            del self._in_flight[key]
        return keys

    def receive_sample(self, sampled: Sampled) -> None:
        """Pass a finished turn to its episode.

        Raises:
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """
        call = self._in_flight.pop(sampled.key)
        call.episode.deliver(call, sampled)
        self._num_over += call.episode.is_suspended

    def result(self) -> RoundResult:
        """Return all samples, and suspend what the budget interrupted.

        Raises:
            EnvironmentFailed: an environment cannot be pickled and `env.on_error` is "stop".
        """
        suspended = []
        for episode in self.episodes:
            if episode.is_suspended:
                if state := episode.suspend():
                    suspended.append(state)
                else:
                    self._settle(episode)
        metrics = {} if self._environments.one_turn else self._metrics()
        metrics |= self._scoring_metrics()
        kept, dropped = [], self._dropped.copy()
        for episode in self.episodes:
            if self._drops and episode.result and episode.result.failure:
                who = f"prompt {episode.prompt.id}, sample {episode.sample_index}"
                dropped.append(f"{who}: {episode.result.failure}")
            else:
                kept.append(episode)
        return RoundResult(
            samples=[sample for episode in kept for sample in episode.samples],
            metrics=metrics,
            suspended=tuple(suspended),
            dropped=tuple(dropped),
        )

    @property
    def _drops(self) -> bool:
        """Whether episodes whose reward functions failed are left out."""
        return self._scorer.on_error == "drop" and not self._rules.keep_failed

    def _add(
        self, prompt: Prompt, group: int, sample_index: int, seed_origin: tuple[int, int]
    ) -> Any:
        kind: Any = EnvironmentEpisode
        if self._environments.is_workflow:
            kind = extras.workflow_episode()
        elif self._rules.token_budget:
            kind = extras.budgeted_episode()
        episode = kind(
            rules=self._rules,
            submit=self._calls.put,
            key=len(self.episodes),
            prompt=prompt,
            group=group,
            sample_index=sample_index,
            seed_origin=seed_origin,
        )
        self.episodes.append(episode)
        return episode

    def _settle(self, episode: Episode) -> bool:
        """Reward an episode that is over; return False if reward functions must be awaited."""
        over = self._reward(episode)
        self._open[episode.group] -= 1
        if not self._open[episode.group]:
            self._scorer.complete_group(episode.group)
        return over

    def _reward(self, episode: Episode) -> bool:
        """Reward an episode; see `_settle`.

        The environment's reward comes before reward functions, unless it is one of their
        components. Functions score the last sequence, and do not score a conversation that its
        environment did not end: its last message answers nothing.
        """
        rules, on_error = self._rules, self._environments.settings.on_error
        if rules.needs_reward and episode.outcome == "stop":
            if episode.rewards_calls and len(self._scorer.components) > 1:
                episode.fail(
                    "it rewarded each call, which reward.function cannot add to its other functions"
                )
            elif episode.reward is None and not episode.rewards_calls:
                episode.fail("it ended without a reward, and reward.function needs one")
        if episode.failure and on_error == "stop":
            raise EnvironmentFailed(
                f"{episode.who}, turn {episode.num_turns}: the {episode.kind} failed "
                f"({episode.failure})\n  --env.on_error drop or zero continues without this sample"
            )
        if episode.failure and not self._environments.has_failed:
            self._environments.has_failed = True
            counts = f"env.on_error is {on_error}. env/zeroed and env/dropped count failures."
            failed = f"{episode.who}: the {episode.kind} failed ({episode.failure})"
            say(f"{failed}\n  {counts}", error=True)
        made = episode.rollouts()
        if not made or (episode.failure and on_error == "drop" and not rules.keep_failed):
            self._dropped.append(f"{episode.who}: the {episode.kind} failed ({episode.failure})")
            return True
        if episode.failure:
            episode.samples = [Sample(rollout=rollout, reward=0.0) for rollout in made]
            return True
        scorer, reward = self._scorer, episode.reward
        if episode.rewards_calls:
            self._sources["by_environment"] += 1
            rewards = [sum(filter(None, rollout.turn_rewards)) for rollout in made]
            weight, parts = 1.0, {}
            if rules.needs_reward:  # it is the only component
                weight = scorer.components[0].weight
                parts = {scorer.components[0].name: sum(rewards)}
            episode.samples = [
                Sample(rollout=rollout, reward=weight * own, parts=parts)
                for rollout, own in zip(made, rewards, strict=True)
            ]
            return True
        if reward is not None:
            self._sources["by_environment"] += 1
        elif episode.outcome != "stop":
            self._sources["unfinished"] += 1
            reward = self._environments.settings.unfinished_reward
        if reward is None or (scorer.uses_environment and len(scorer.components) > 1):
            self._sources["by_function"] += 1
        if reward is None or scorer.uses_environment:
            self._awaiting[episode.key] = made
            scorer.submit(episode.key, made[-1], episode.prompt, environment_reward=reward)
            return False
        episode.samples = [Sample(rollout=rollout, reward=reward) for rollout in made]
        return True

    def _take(self, result: RewardResult) -> None:
        """Take what reward functions returned."""
        episode = self.episodes[cast("int", result.key)]
        *others, last = self._awaiting.pop(episode.key)
        if result.metrics:
            last = replace(last, metrics={**last.metrics, **result.metrics})
        episode.result = result
        episode.samples = [
            Sample(rollout=rollout, reward=result.reward, parts=result.parts)
            for rollout in (*others, last)
        ]

    def _scoring_metrics(self) -> dict[str, Any]:
        """Partials of what scoring took; none if every component is quick and nothing failed."""
        counts = self._scorer.take_counts()
        results = [episode.result for episode in self.episodes if episode.result]
        failed = float(sum(bool(result.failure) for result in results))
        unreported = float(sum(bool(result.unreported) for result in results))
        if self._scorer.quick and not failed and not unreported:
            return {}
        dropped = failed if self._drops else 0.0
        return {
            "time/judge_mean_s": Mean(
                total=sum(result.seconds for result in results), count=float(len(results))
            ),
            "reward/dropped": Sum(value=dropped),
            "reward/zeroed": Sum(value=failed - dropped),
            "reward/unreported": Sum(value=unreported),
            **{f"reward/{name}": Sum(value=float(counts[name])) for name in _CALL_COUNTS},
        }

    def shares(self) -> dict[str, Any]:
        """Partials of who gave the rewards."""
        rewarded = float(sum(bool(each.samples) and not each.failure for each in self.episodes))
        return {
            f"reward/{name}_frac": Mean(total=float(self._sources[name]), count=rewarded)
            for name in ("by_environment", "by_function", "unfinished")
        }

    def _metrics(self) -> dict[str, Any]:
        """Partials of env/*, of who gave the rewards, and of routes that were requested twice."""
        over = [each for each in self.episodes if each.num_turns and not each.is_suspended]
        sequences = [
            each for episode in over for each in episode.sequences if each.train and each.calls
        ]
        counts = self._environments.take_counts()
        failed = sum(bool(each.failure) for each in self.episodes)
        at_limit = sum(each.outcome == "turns" for each in over)
        began = float(len(over))
        metrics: dict[str, Any] = {
            "env/unread": Sum(value=float(self._rules.setup.parser.take_unread())),
            "env/turns_mean": Mean(total=float(sum(each.num_turns for each in over)), count=began),
            "env/max_turns_frac": Mean(total=float(at_limit), count=began),
            "env/dropped": Sum(value=float(len(self._dropped))),
            "env/zeroed": Sum(value=float(failed - len(self._dropped))),
            **{f"env/{name}": Sum(value=float(counts[name])) for name in _CALL_COUNTS},
            **self.shares(),
        }
        differing = [each.transcript.differing for each in sequences]
        if slots := sum(total for _, total in differing):  # routes that were requested twice
            different = float(sum(bad for bad, _ in differing))
            metrics["routing/overlap_differs"] = Mean(total=different, count=float(slots))
        if self._environments.is_workflow:
            calls = sum(each.num_calls for each in over)
            metrics |= {
                **{
                    name: Sum(value=float(sum(each.refused[cause] for each in self.episodes)))
                    for cause, name in REFUSED.items()
                },
                "env/sequences_mean": Mean(total=float(len(sequences)), count=float(len(over))),
                "env/continued_frac": Mean(total=float(calls - len(sequences)), count=float(calls)),
            }
        return metrics
