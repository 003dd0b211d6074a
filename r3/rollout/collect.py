"""One round of conversations: all in flight at once, each rewarded while others are sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from r3.engine import Engine, Sampled, Sampling, Turn
from r3.envs.workflow import Workflows
from r3.metrics.reduce import Mean, StandardDeviation, Sum
from r3.metrics.users import means
from r3.rewards.scorer import Scorer
from r3.rollout.collected import CollectedRollouts
from r3.rollout.conversation import (
    Conversation,
    ConversationRules,
    ConversationSetup,
    Progress,
    SuspendedConversation,
)
from r3.rollout.episodes import EpisodeRound
from r3.rollout.rewarding import Rewarding, call_metrics, overlap_metrics, turn_metrics
from r3.runtime.mesh import Mesh
from r3.types import Prompt

# Longest wait for a reply while the engine is idle. The ranks of an engine synchronise after it.
_IDLE_WAIT_S = 1.0
# The same while both environments and reward functions are waited for, which are polled in turn.
_POLL_INTERVAL_S = 0.01


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
            asked = {first_group + index: prompts[index] for index in prompt_indices}
            leader = self._round(asked, seed_step, resumed) if engine.is_leader else None
            remaining: int = engine.share(leader.size if leader else None)
            # A call of an episode that is over stays in flight until the engine has finished it.
            while remaining or sampler.busy:
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
            if engine.is_leader:
                result.metrics["engine/preemptions"] = Sum(value=float(sampler.preemptions))
            return result

    def _round(
        self,
        prompts: Mapping[int, Prompt],
        seed_step: int,
        resumed: Sequence[SuspendedConversation],
    ) -> Round | EpisodeRound:
        rules, samples = self._rules(), self.samples_per_prompt
        if isinstance(self.setup.environments, Workflows):
            assert not resumed, "workflows cannot be suspended"
            return EpisodeRound(
                rules, self.scorer, prompts, seed_step=seed_step, samples_per_prompt=samples
            )
        return Round(
            rules,
            self.scorer,
            prompts,
            seed_step=seed_step,
            samples_per_prompt=samples,
            resumed=resumed,
        )

    def _rules(self) -> ConversationRules:
        setup = self.setup
        return ConversationRules(
            setup=setup,
            sampling=replace(
                self.sampling,
                stop=setup.environments.stop,
                stop_tokens=setup.stop_tokens,
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
        self._rules = rules
        self._environments = rules.setup.environment_calls
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
        self._rewarding = Rewarding(
            scorer,
            [each.group for each in self.conversations],
            unfinished_reward=self._environments.settings.unfinished_reward,
            keep_failed=rules.keep_failed,
        )
        assert not (rules.token_budget and scorer.scores_groups), (
            f"a token budget of {rules.token_budget} suspends samples that are scored together"
        )
        restored = self.conversations[: len(resumed)]
        self._first_turns = [each.resume() for each in restored if not each.outcome]
        # Conversations that were suspended, or could not be restored, since the last `advance`.
        self._num_suspended = sum(self._settle(each) for each in restored if each.outcome)

    @property
    def size(self) -> int:
        """Number of its conversations."""
        return len(self.conversations)

    def advance(self, engine_busy: bool) -> tuple[list[Turn], int]:
        """Take what environments and reward functions returned.

        Waits for them only while the engine has nothing to do.

        Returns:
            Turns to sample, and the number of conversations that are over or suspended.
        """
        turns, self._first_turns = self._first_turns, []
        finished, self._num_suspended = self._num_suspended, 0
        environments, rewarding = self._environments, self._rewarding
        both = rewarding.outstanding and environments.outstanding
        wait_s = _POLL_INTERVAL_S if both else _IDLE_WAIT_S
        for reply in environments.poll(0.0 if engine_busy else wait_s):
            conversation = self.conversations[reply.key]
            if turn := conversation.receive_reply(reply):
                turns.append(turn)
            else:
                finished += self._settle(conversation)
        finished += rewarding.poll(0.0 if engine_busy or turns or finished else wait_s)
        return turns, finished

    def receive_sample(self, sampled: Sampled) -> None:
        """Pass a finished turn to its conversation."""
        conversation = self.conversations[sampled.key]
        conversation.receive_sample(sampled)
        self._num_suspended += conversation.is_suspended

    def _settle(self, conversation: Conversation) -> bool:
        """Whether nothing more is awaited of a conversation that has no next turn now."""
        over = conversation.is_dropped or conversation.is_suspended or self._reward(conversation)
        self._rewarding.leave(conversation.group)
        return over

    def _reward(self, conversation: Conversation) -> bool:
        """Reward a conversation that is over; return False if reward functions must be awaited."""
        key, rollouts = conversation.key, (conversation.rollout(),)
        if conversation.outcome == "error":
            self._rewarding.fail(key, rollouts)
            return True
        return self._rewarding.reward(
            key,
            rollouts,
            conversation.prompt,
            given=conversation.environment_reward,
            finished=conversation.ended_by_environment,
        )

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
            metrics |= self._rewarding.source_metrics()
        metrics |= self._rewarding.scoring_metrics()
        rollouts, rewards, parts = self._rewarding.collected()
        return CollectedRollouts(
            rollouts=rollouts,
            rewards=rewards,
            parts=parts,
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
    return {
        **turn_metrics(
            [each.progress.turns for each in over], sum(each.outcome == "turns" for each in over)
        ),
        **call_metrics(counts, failed=len(failed), dropped=sum(each.is_dropped for each in failed)),
        **overlap_metrics([each.transcript.differing for each in over if each.transcript]),
    }


def rollout_metrics(collected: CollectedRollouts) -> dict[str, Any]:
    """Partials of reward/*, rollout/* and users' metrics of this rank's rollouts."""
    rollouts, count = collected.rollouts, float(len(collected.rollouts))
    # Sequences of an episode that share their reward count once.
    by_unit = dict(zip((each.unit for each in rollouts), collected.rewards, strict=True))
    rewards = list(by_unit.values())
    by_group: dict[int, list[float]] = {}
    for (group, _, _), reward in by_unit.items():
        by_group.setdefault(group, []).append(reward)
    groups = list(by_group.values())
    by_component: dict[str, list[float]] = {}
    for parts in collected.parts.values():
        for name, part in parts.items():
            by_component.setdefault(name, []).append(part)
    return {
        "reward/mean": Mean(total=sum(rewards), count=float(len(rewards))),
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
