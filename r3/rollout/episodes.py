"""One round of episodes of workflows, on the leader rank of an engine."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from r3.engine import Sampled, Transcript, Turn
from r3.envs.workflow import Ended, Workflows
from r3.metrics.reduce import Mean
from r3.rewards.scorer import Scorer
from r3.rollout.collected import CollectedRollouts
from r3.rollout.conversation import ConversationRules, EnvironmentFailed
from r3.rollout.episode import Call, EpisodeRules, LiveEpisode
from r3.rollout.rewarding import Rewarding, call_metrics, overlap_metrics, turn_metrics
from r3.types import Prompt, Rollout, RouteError

# Longest wait for an episode while the engine is idle. The ranks of an engine synchronise after it.
_IDLE_WAIT_S = 1.0
# The same while both episodes and reward functions are waited for, which are polled in turn.
_POLL_INTERVAL_S = 0.01


class EpisodeRound:
    """The episodes of one round, on the leader rank of an engine.

    The caller samples the turns that `advance` returns and passes them to `receive_sample`.

    Attributes:
        size: number of episodes.
    """

    def __init__(
        self,
        rules: ConversationRules,
        scorer: Scorer,
        prompts: Mapping[int, Prompt],
        *,
        seed_step: int,
        samples_per_prompt: int,
    ) -> None:
        """Start all episodes.

        Args:
            prompts: group -> prompt.
            seed_step: step that names the random streams.
        """
        assert isinstance(rules.setup.environments, Workflows)
        assert rules.setup.renderer is not None and not rules.token_budget
        self._rules, self._scorer = rules, scorer
        self._workflows = rules.setup.environments
        self._settings = self._workflows.settings
        self._requests: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._faults: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._in_flight: dict[int, Call] = {}
        episode_rules = EpisodeRules(
            conversation=rules,
            settings=self._settings,
            renderer=rules.setup.renderer,
            tools=self._workflows.tools,
            seed_step=seed_step,
            submit=self._submit,
            next_key=itertools.count().__next__,
        )
        samples = [
            (prompt, group, sample_index)
            for group, prompt in prompts.items()
            for sample_index in range(samples_per_prompt)
        ]
        self.size = len(samples)
        # The last attempt at each episode.
        self._episodes = [LiveEpisode(episode_rules, *sample) for sample in samples]
        self._over: list[tuple[LiveEpisode, str]] = []
        self._dropped = 0
        self._rewarding = Rewarding(
            scorer,
            [group for _, group, _ in samples],
            unfinished_reward=self._settings.unfinished_reward,
            keep_failed=rules.keep_failed,
        )

        def attempt(key: int) -> LiveEpisode:
            self._episodes[key] = LiveEpisode(episode_rules, *samples[key])
            return self._episodes[key]

        for key, (prompt, _, _) in enumerate(samples):
            self._workflows.open(key, prompt, partial(attempt, key))

    def advance(self, engine_busy: bool) -> tuple[list[Turn], int]:
        """Take calls of the model, and what workflows and reward functions returned.

        Waits for them only while the engine has nothing to do.

        Returns:
            Turns to sample, and the number of episodes that are over.

        Raises:
            EnvironmentFailed: a workflow failed and `env.on_error` is "stop", or one blocks the
                event loop.
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """
        if where := self._workflows.blocked():
            raise EnvironmentFailed(
                f"a workflow blocked the event loop for {self._settings.timeout_s:g} s "
                f"(env.timeout_s), so that no episode could go on:\n{where}"
                "  Await what takes time: await asyncio.to_thread(function)"
            )
        both = self._rewarding.outstanding and self._workflows.outstanding
        wait_s = _POLL_INTERVAL_S if both else _IDLE_WAIT_S
        ended = self._workflows.poll(0.0 if engine_busy else wait_s)
        finished = sum(self._settle(each) for each in ended)
        turns = []
        while not self._requests.empty():
            call = self._requests.get()
            if not call.future.done():  # else nobody awaits it any more
                self._in_flight[call.turn.key] = call
                turns.append(call.turn)
        finished += self._rewarding.poll(0.0 if engine_busy or turns or finished else wait_s)
        if not self._faults.empty():
            raise self._faults.get()
        return turns, finished

    def receive_sample(self, sampled: Sampled) -> None:
        """Pass a finished turn to its episode."""
        self._workflows.call_soon(self._deliver, self._in_flight.pop(sampled.key), sampled)

    def result(self) -> CollectedRollouts:
        """Return all sequences with their rewards."""
        rollouts, rewards, parts = self._rewarding.collected()
        over = [each for each, outcome in self._over if each.num_turns]
        calls = float(sum(each.num_calls for each in over))
        sequences = [sequence for each in over for sequence in each.sequences if sequence.train]
        failed = sum(outcome == "error" for _, outcome in self._over)
        metrics = {
            **turn_metrics(
                [each.num_turns for each in over],
                sum(outcome == "turns" for _, outcome in self._over),
            ),
            "env/sequences_mean": Mean(total=float(len(sequences)), count=float(len(over))),
            "env/continued_frac": Mean(
                total=float(sum(each.num_continued for each in over)), count=calls
            ),
            **call_metrics(self._workflows.take_counts(), failed=failed, dropped=self._dropped),
            **overlap_metrics([sequence.transcript.differing for sequence in sequences]),
            **self._rewarding.source_metrics(),
            **self._rewarding.scoring_metrics(),
        }
        return CollectedRollouts(rollouts=rollouts, rewards=rewards, parts=parts, metrics=metrics)

    def _submit(self, call: Call) -> None:
        self._requests.put(call)
        self._workflows.wake.put(None)

    def _deliver(self, call: Call, sampled: Sampled) -> None:
        try:
            call.episode.deliver(call, sampled)
        except (RouteError, FloatingPointError, AssertionError) as error:
            # Not the workflow's fault: the engine's thread raises it and ends the run.
            self._faults.put(error)
            self._workflows.wake.put(None)

    def _settle(self, ended: Ended) -> bool:
        """Reward an episode that is over; return False if reward functions must be awaited."""
        episode = self._episodes[ended.key]
        over = self._reward(episode, ended, self._failure(episode, ended))
        self._rewarding.leave(episode.group)
        return over

    def _failure(self, episode: LiveEpisode, ended: Ended) -> str:
        """Why an episode counts as failed; "" if it does not."""
        if ended.failure is not None:
            return f"{ended.failure.kind}: {ended.failure.text}"
        rules, result = self._rules, ended.result
        if not episode.num_calls and not rules.keep_failed:
            why = f" ({ended.limit})" if ended.limit else ""
            return f"it made no call of the model with train=True: nothing to train on{why}"
        if result is None:
            return ""
        if result.call_rewards and len(self._scorer.components) > 1 and rules.needs_reward:
            return "it rewarded each call, which reward.function cannot add to its other functions"
        if rules.needs_reward and result.reward is None and not result.call_rewards:
            return "it ended without a reward, and reward.function needs one"
        return ""

    def _reward(self, episode: LiveEpisode, ended: Ended, failure: str) -> bool:
        settings, keep_failed = self._settings, self._rules.keep_failed
        outcome = "error" if failure else ended.limit.limit if ended.limit else "stop"
        self._over.append((episode, outcome))
        if failure and settings.on_error == "stop":
            raise EnvironmentFailed(
                f"{episode.who}, turn {episode.num_turns}: the workflow failed ({failure})\n"
                "  --env.on_error drop or zero continues without this sample"
            )
        result = ended.result if not failure else None
        rollouts = episode.rollouts(
            outcome, result.metrics if result else {}, result.call_rewards if result else ()
        )
        if not rollouts and keep_failed:
            rollouts = [self._bare(episode, outcome, result.metrics if result else {})]
        if not rollouts or (failure and settings.on_error == "drop" and not keep_failed):
            self._dropped += 1
            return True
        if failure:
            self._rewarding.fail(ended.key, rollouts)
            return True
        if result and result.call_rewards:
            weight = self._scorer.components[0].weight if self._rules.needs_reward else 1.0
            rewards = [weight * sum(filter(None, each.turn_rewards)) for each in rollouts]
            self._rewarding.reward_each(ended.key, rollouts, rewards)
            return True
        return self._rewarding.reward(
            ended.key,
            rollouts,
            episode.prompt,
            given=result.reward if result else None,
            finished=not ended.limit,
        )

    def _bare(self, episode: LiveEpisode, outcome: str, metrics: Mapping[str, float]) -> Rollout:
        """The prompt alone, for an evaluated episode without a trained call."""
        transcript = Transcript(self._rules.capture, episode.prompt.tokens_T, who=episode.who)
        rollout = transcript.rollout(
            episode.prompt,
            group=episode.group,
            sample_index=episode.sample_index,
            finish_reason=outcome,
            response="",
        )
        return replace(rollout, metrics=metrics)
