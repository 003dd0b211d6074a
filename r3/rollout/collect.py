"""One round of conversations: all in flight at once, each rewarded while others are sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

from r3.engine import Engine, Sampled, Sampling, Turn
from r3.metrics.reduce import Mean, StandardDeviation, Sum
from r3.metrics.users import means
from r3.rewards.scorer import RewardResult, Scorer
from r3.rollout.conversation import (
    Conversation,
    ConversationRules,
    ConversationSetup,
    Progress,
    SuspendedConversation,
)
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout

# Longest wait for a reply while the engine is idle. The ranks of an engine synchronise after it.
_IDLE_WAIT_S = 1.0
# The same while both environments and reward functions are waited for, which are polled in turn.
_POLL_INTERVAL_S = 0.01

# Where rewards come from, by the name of the metric.
_SOURCES = {"by_environment": "environment", "by_function": "function", "unfinished": "unfinished"}

# Counters that environments and reward functions share.
_CALL_COUNTS = ("calls", "errors", "timeouts", "crashes", "retries")


@dataclass(frozen=True, kw_only=True)
class CollectedRollouts:
    """Rollouts of this rank's engine with their rewards, in order of group and sample.

    Empty on ranks that are not the leader of their engine. Groups are complete, except for
    conversations whose environment or reward failed (`env.on_error`, `reward.on_error` "drop").

    Attributes:
        rewards: one per rollout.
        parts: rewards of each component by (group, sample_index), where functions were called.
        metrics: partials of the conversations themselves.
        suspended: conversations that the token budget interrupted.
    """

    rollouts: list[Rollout]
    rewards: list[float]
    parts: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    suspended: tuple[SuspendedConversation, ...] = ()

    @classmethod
    def joined(cls, rounds: Sequence[CollectedRollouts]) -> CollectedRollouts:
        """Join rounds that have different groups, without metrics and suspended conversations."""
        return cls(
            rollouts=[rollout for each in rounds for rollout in each.rollouts],
            rewards=[reward for each in rounds for reward in each.rewards],
            parts={name: parts for each in rounds for name, parts in each.parts.items()},
        )

    def of_groups(self, groups: frozenset[int]) -> CollectedRollouts:
        """Return the rollouts of some groups, without metrics and suspended conversations."""
        kept = [
            pair
            for pair in zip(self.rollouts, self.rewards, strict=True)
            if pair[0].group in groups
        ]
        return CollectedRollouts(
            rollouts=[rollout for rollout, _ in kept],
            rewards=[reward for _, reward in kept],
            parts={name: parts for name, parts in self.parts.items() if name[0] in groups},
        )

    def in_order(self) -> CollectedRollouts:
        """Sort by group and sample, without metrics and suspended conversations."""
        pairs = sorted(
            zip(self.rollouts, self.rewards, strict=True),
            key=lambda pair: (pair[0].group, pair[0].sample_index),
        )
        return replace(
            self,
            rollouts=[rollout for rollout, _ in pairs],
            rewards=[reward for _, reward in pairs],
            metrics={},
            suspended=(),
        )


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Holds conversations about prompts and rewards them; built once, used for many rounds.

    Attributes:
        setup: environments, tokenizer and chat template.
        scorer: rewards each conversation when it ends, beside the engine.
        sampling: how tokens are drawn; the strings and tokens that end a turn are added to it.
        run_seed: seed of the run.
        samples_per_prompt: conversations per prompt.
        max_response_tokens: maximum tokens of a conversation after its first messages, sampled
            and observed.
        token_budget: tokens that a conversation may sample per round before it is suspended; 0 is
            no budget.
        keep_failed: conversations that `on_error` would drop end with reward 0 instead.
    """

    engine: Engine
    mesh: Mesh
    setup: ConversationSetup
    scorer: Scorer
    sampling: Sampling
    run_seed: int
    samples_per_prompt: int
    max_response_tokens: int
    token_budget: int = 0
    keep_failed: bool = False

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        policy_version: int,
        seed_step: int,
        first_group: int = 0,
        prompt_indices: Sequence[int] | None = None,
        resumed: Sequence[SuspendedConversation] = (),
        on_rollout: Callable[[], None] = lambda: None,
    ) -> CollectedRollouts:
        """Hold one round of conversations, sampled with weights of `policy_version`.

        All ranks of one engine must call together; engines are independent. What is sampled
        depends only on the run's seed, `seed_step`, prompt, group, sample and turn.

        Args:
            prompts: all prompts of the round, the same on every rank. Engine i of n takes prompts
                i, i + n, ...
            seed_step: step that names the random streams of the new conversations.
            first_group: group of the first prompt.
            prompt_indices: prompts that this engine takes instead.
            resumed: suspended conversations that this engine resumes.
            on_rollout: called when a conversation has its reward, is suspended or is dropped.

        Raises:
            EngineStateError: the engine is asleep or holds other weights.
            EnvironmentFailed: an environment failed and `env.on_error` is "stop".
            RewardError: a reward function failed and `reward.on_error` is "stop".
        """
        engine = self.engine
        if prompt_indices is None:
            prompt_indices = range(self.mesh.engine_dp.rank, len(prompts), self.mesh.engine_dp.size)
        with ExitStack() as stack:
            sampler = stack.enter_context(engine.sampler(policy_version=policy_version))
            # Runs if the round fails: whatever stops a run, environments are closed.
            on_failure = stack.enter_context(ExitStack())
            on_failure.callback(self.setup.environments.close_all)
            # Environments and rewards exist on the leader. The other ranks of its engine add the
            # turns that it shares.
            leader = (
                Round(
                    self._rules(),
                    self.scorer,
                    {first_group + index: prompts[index] for index in prompt_indices},
                    seed_step=seed_step,
                    samples_per_prompt=self.samples_per_prompt,
                    resumed=resumed,
                )
                if engine.is_leader
                else None
            )
            remaining: int = engine.share(len(leader.conversations) if leader else None)
            while remaining:
                turns, finished = engine.share(leader.advance(sampler.busy) if leader else None)
                for turn in turns:
                    sampler.add(turn)
                for _ in range(finished):
                    on_rollout()
                remaining -= finished
                if sampler.busy:
                    for sampled in sampler.step():
                        if leader:
                            leader.receive_sample(sampled)
            result = leader.result() if leader else CollectedRollouts(rollouts=[], rewards=[])
            on_failure.pop_all()
            return result

    def _rules(self) -> ConversationRules:
        setup = self.setup
        return ConversationRules(
            setup=setup,
            sampling=replace(
                self.sampling,
                stop=setup.environments.stop,
                stop_tokens=(setup.chat.end,) if setup.chat else (),
            ),
            capture=self.engine.capture_spec,
            run_seed=self.run_seed,
            max_response_tokens=self.max_response_tokens,
            max_model_len=self.engine.max_model_len,
            token_budget=self.token_budget,
            keep_failed=self.keep_failed,
            needs_reward=self.scorer.uses_environment,
        )


class Round:
    """The conversations of one round, on the leader rank of an engine.

    The caller samples the turns that `advance` returns and passes them to `receive_sample`.

    Attributes:
        conversations: by key, those that are resumed first.
    """

    def __init__(
        self,
        rules: ConversationRules,
        scorer: Scorer,
        prompts: Mapping[int, Prompt],
        *,
        seed_step: int,
        samples_per_prompt: int,
        resumed: Sequence[SuspendedConversation] = (),
    ) -> None:
        """Create all conversations and open the environments of the new ones.

        Args:
            prompts: group -> prompt.
            seed_step: step that names the random streams of new conversations.
        """
        self._rules, self._scorer = rules, scorer
        self._environments = rules.setup.environments
        self.conversations = [
            Conversation.resumed(suspended, rules, key=key) for key, suspended in enumerate(resumed)
        ]
        for group, prompt in prompts.items():
            for sample_index in range(samples_per_prompt):
                conversation = Conversation(
                    rules,
                    key=len(self.conversations),
                    prompt=prompt,
                    group=group,
                    sample_index=sample_index,
                    progress=Progress(seed_origin=(seed_step, group)),
                )
                self.conversations.append(conversation)
                self._environments.open(conversation.key, prompt)
        # Conversations of each group that may still be submitted to the scorer.
        self._open = Counter(each.group for each in self.conversations)
        assert not (rules.token_budget and scorer.scores_groups), (
            f"a token budget of {rules.token_budget} suspends samples that are scored together"
        )
        self._rollouts: dict[int, Rollout] = {}
        self._rewards: dict[int, float] = {}
        self._reward_results: dict[int, RewardResult] = {}
        self._sources: Counter[str] = Counter()  # of rewards, see `_reward`
        restored = self.conversations[: len(resumed)]
        self._first_turns = [each.resume() for each in restored if not each.outcome]
        # Conversations that were suspended, or could not be restored, since the last `advance`.
        self._num_suspended = sum(self._settle(each) for each in restored if each.outcome)

    def advance(self, engine_busy: bool) -> tuple[list[Turn], int]:
        """Take what environments and reward functions returned.

        Waits for them only while the engine has nothing to do.

        Returns:
            Turns to sample, and the number of conversations that are over or suspended.
        """
        turns, self._first_turns = self._first_turns, []
        finished, self._num_suspended = self._num_suspended, 0
        environments, scorer = self._environments, self._scorer
        both = scorer.outstanding and environments.outstanding
        wait_s = _POLL_INTERVAL_S if both else _IDLE_WAIT_S
        for reply in environments.poll(0.0 if engine_busy else wait_s):
            conversation = self.conversations[reply.key]
            if turn := conversation.receive_reply(reply):
                turns.append(turn)
            else:
                finished += self._settle(conversation)
        for result in scorer.poll(0.0 if engine_busy or turns or finished else wait_s):
            key = cast("int", result.key)
            if result.metrics:
                rollout = self._rollouts[key]
                metrics = {**rollout.metrics, **result.metrics}
                self._rollouts[key] = replace(rollout, metrics=metrics)
            self._reward_results[key], self._rewards[key] = result, result.reward
            finished += 1
        return turns, finished

    def receive_sample(self, sampled: Sampled) -> None:
        """Pass a finished turn to its conversation."""
        conversation = self.conversations[sampled.key]
        conversation.receive_sample(sampled)
        self._num_suspended += conversation.is_suspended

    def _settle(self, conversation: Conversation) -> bool:
        """Whether nothing more is awaited of a conversation that has no next turn now."""
        over = conversation.is_dropped or conversation.is_suspended or self._reward(conversation)
        self._open[conversation.group] -= 1
        if not self._open[conversation.group]:
            self._scorer.complete_group(conversation.group)
        return over

    def _reward(self, conversation: Conversation) -> bool:
        """Reward a conversation that is over; return False if reward functions must be awaited.

        A failed conversation gets 0. The environment's reward comes before reward functions, unless
        it is one of their components. Functions do not score a conversation that its environment
        did not end: its last message answers nothing.
        """
        key, scorer = conversation.key, self._scorer
        rollout = self._rollouts[key] = conversation.rollout()
        if conversation.outcome == "error":
            self._rewards[key] = 0.0
            return True
        reward = conversation.environment_reward
        if reward is not None:
            self._sources["environment"] += 1
        elif not conversation.ended_by_environment:
            self._sources["unfinished"] += 1
            reward = self._environments.settings.unfinished_reward
        if reward is None or (scorer.uses_environment and len(scorer.components) > 1):
            self._sources["function"] += 1
        if reward is None or scorer.uses_environment:
            scorer.submit(key, rollout, conversation.prompt, environment_reward=reward)
            return False
        self._rewards[key] = reward
        return True

    def result(self) -> CollectedRollouts:
        """Return all rollouts with their rewards, and suspend what the budget interrupted."""
        suspended = []
        for each in self.conversations:
            if each.is_suspended:
                if state := each.suspend():
                    suspended.append(state)
                else:
                    self._settle(each)
        counts = self._environments.take_counts()
        metrics: dict[str, Any] = {}
        if not self._environments.one_turn:
            metrics |= _conversation_metrics(self.conversations, counts)
            rewarded = len(self._rollouts) - sum(
                each.outcome == "error" for each in self.conversations if each.key in self._rollouts
            )
            metrics |= {
                f"reward/{name}_frac": Mean(
                    total=float(self._sources[source]), count=float(rewarded)
                )
                for name, source in _SOURCES.items()
            }
        metrics |= _scoring_metrics(self._reward_results, self._scorer, self._rules.keep_failed)
        keys = sorted(self._rollouts)
        if self._scorer.on_error == "drop" and not self._rules.keep_failed:
            failed = {key for key, result in self._reward_results.items() if result.failure}
            keys = [key for key in keys if key not in failed]
        names = {key: (self._rollouts[key].group, self._rollouts[key].sample_index) for key in keys}
        return CollectedRollouts(
            rollouts=[self._rollouts[key] for key in keys],
            rewards=[self._rewards[key] for key in keys],
            parts={
                names[key]: self._reward_results[key].parts
                for key in keys
                if key in self._reward_results
            },
            metrics=metrics,
            suspended=tuple(suspended),
        )


def _conversation_metrics(
    conversations: Sequence[Conversation], counts: Counter[str]
) -> dict[str, Any]:
    """Partials of env/* and of the routes that were requested twice."""
    over = [
        each
        for each in conversations
        if each.transcript is not None and each.progress.turns and not each.is_suspended
    ]
    failed = [each for each in conversations if each.outcome == "error"]
    dropped = sum(each.is_dropped for each in failed)
    differing = [each.transcript.differing for each in over if each.transcript is not None]
    count = float(len(over))
    metrics: dict[str, Any] = {
        "env/turns_mean": Mean(total=float(sum(each.progress.turns for each in over)), count=count),
        "env/max_turns_frac": Mean(
            total=float(sum(each.outcome == "turns" for each in over)), count=count
        ),
        "env/dropped": Sum(value=float(dropped)),
        "env/zeroed": Sum(value=float(len(failed) - dropped)),
        **{f"env/{name}": Sum(value=float(counts[name])) for name in _CALL_COUNTS},
    }
    if slots := sum(total for _, total in differing):
        metrics["routing/overlap_differs"] = Mean(
            total=float(sum(bad for bad, _ in differing)), count=float(slots)
        )
    return metrics


def _scoring_metrics(
    results: Mapping[int, RewardResult], scorer: Scorer, keep_failed: bool
) -> dict[str, Any]:
    """Partials of what scoring took; none if every component is quick and nothing failed."""
    counts = scorer.take_counts()
    failed = float(sum(bool(result.failure) for result in results.values()))
    if scorer.quick and not failed:
        return {}
    dropped = failed if scorer.on_error == "drop" and not keep_failed else 0.0
    return {
        "time/judge_mean_s": Mean(
            total=sum(result.seconds for result in results.values()), count=float(len(results))
        ),
        "reward/dropped": Sum(value=dropped),
        "reward/zeroed": Sum(value=failed - dropped),
        **{f"reward/{name}": Sum(value=float(counts[name])) for name in _CALL_COUNTS},
    }


def rollout_metrics(collected: CollectedRollouts) -> dict[str, Any]:
    """Partials of reward/*, rollout/* and users' metrics of this rank's rollouts."""
    rollouts, rewards = collected.rollouts, collected.rewards
    count = float(len(rewards))
    by_group: dict[int, list[float]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        by_group.setdefault(rollout.group, []).append(reward)
    groups = list(by_group.values())
    by_component: dict[str, list[float]] = {}
    for parts in collected.parts.values():
        for name, part in parts.items():
            by_component.setdefault(name, []).append(part)
    return {
        "reward/mean": Mean(total=sum(rewards), count=count),
        "reward/std": StandardDeviation(tuple(rewards)),
        **{
            f"reward/{name}/mean": Mean(total=sum(values), count=float(len(values)))
            for name, values in by_component.items()
        },
        "reward/group_zero_std_frac": Mean(
            total=float(sum(max(group) == min(group) for group in groups)), count=float(len(groups))
        ),
        "rollout/response_tokens_mean": Mean(
            total=float(sum(rollout.num_response_tokens for rollout in rollouts)), count=count
        ),
        "rollout/truncated_frac": Mean(
            total=float(sum(rollout.finish_reason == "length" for rollout in rollouts)), count=count
        ),
        "rollout/tokens": Sum(value=float(sum(len(rollout.tokens_T) for rollout in rollouts))),
        **means(rollout.metrics for rollout in rollouts),
    }
