"""One round of conversations: shared out over the engines, all in flight at once, each judged while others still run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from r3.config import EnvConfig
from r3.engine import Engine, Sampling
from r3.metrics.reduce import Mean, StandardDeviation, Sum
from r3.rewards.scorer import RewardResult, Scorer
from r3.rollout.conversation import Conversation, ConversationSetup, Held
from r3.runtime.mesh import Mesh
from r3.types import Prompt, Rollout

# While nothing is in flight and environments work. The ranks of one engine meet at least this often.
_IDLE_WAIT_S = 1.0
_SLICE_S = 0.01  # between looks at environments and judges, when both are waited for


@dataclass(frozen=True, kw_only=True)
class CollectedRollouts:
    """This rank's rollouts and their rewards, parallel lists in order of group and member.

    Empty on ranks that only lend their device to another rank's engine. Groups are whole, but for conversations whose
    environment or reward failed (`env.on_error`, `reward.on_error` "drop"). `parts` are the rewards of each component by
    (group, member), where the judge was asked. `facts` are metric partials of the conversations themselves, `held` those that
    the budget interrupted.
    """

    rollouts: list[Rollout]
    rewards: list[float]
    parts: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    held: tuple[Held, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[CollectedRollouts]) -> CollectedRollouts:
        """All of several rounds, whose groups have numbers of their own; facts and what is held aside."""
        return cls(
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            rewards=[reward for part in parts for reward in part.rewards],
            parts={name: found for part in parts for name, found in part.parts.items()},
        )

    def of_groups(self, groups: frozenset[int]) -> CollectedRollouts:
        """Those of some groups; facts and what is held aside."""
        kept = [
            pair
            for pair in zip(self.rollouts, self.rewards, strict=True)
            if pair[0].group in groups
        ]
        return CollectedRollouts(
            rollouts=[rollout for rollout, _ in kept],
            rewards=[reward for _, reward in kept],
            parts={name: found for name, found in self.parts.items() if name[0] in groups},
        )

    def in_order(self) -> CollectedRollouts:
        """In order of group and member; facts and what is held aside."""
        pairs = sorted(
            zip(self.rollouts, self.rewards, strict=True),
            key=lambda pair: (pair[0].group, pair[0].sample_index),
        )
        return replace(
            self,
            rollouts=[rollout for rollout, _ in pairs],
            rewards=[reward for _, reward in pairs],
            facts={},
            held=(),
        )


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    mesh: Mesh,
    *,
    members: int,
    policy_version: int,
    run_seed: int,
    seed_step: int,
    max_tokens: int,
    temperature: float,
    first_group: int = 0,
    places: Sequence[int] | None = None,
    held: Sequence[Held] = (),
    budget: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    conversation_setup: ConversationSetup | None = None,
    keep_all: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> CollectedRollouts:
    """Hold `members` conversations about every prompt with the policy of `version`.

    `prompts` are all of the round, the same on every rank; engine i takes prompts i, i + n, ... of n engines. What is sampled
    depends on (run_seed, seed_step, prompt, member, turn) alone. Ranks of one engine must call together; engines are
    independent.

    Args:
        first_group: number of the first prompt's group in the step.
        places: of the prompts that this engine takes instead.
        held: conversations that this rank's engine goes on with, too.
        budget: tokens that a conversation may be given now; then it is interrupted, and held. With stop strings a message is
            never cut, since one might lie across the cut: the conversation is interrupted before its next one. 0 = none.
        max_tokens: tokens of a conversation after its first messages, sampled and observed.
        talk: the environment; None = one question, one answer.
        judge: asked about each conversation when it ends; the engine goes on meanwhile.
        keep_all: conversations that `on_error` would leave out end with reward 0 instead, and routes may be absent.

    Raises:
        EnvironmentFailed, RewardError: an environment or a reward failed and that stops the run.
    """
    conversation_setup = conversation_setup or ConversationSetup.of(
        EnvConfig(), engine.tokenizer, ""
    )
    settings = conversation_setup.environments.settings
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=conversation_setup.environments.stop,
        stop_tokens=(conversation_setup.chat.end,) if conversation_setup.chat else (),
    )
    common: dict[str, Any] = {
        "engine": engine,
        "conversation_setup": conversation_setup,
        "sampling": sampling,
        "budget": budget,
        "on_error": settings.on_error,
        "keep": keep_all,
    }
    conversations = [
        Conversation.resumed(each, key, run_seed, **common) for key, each in enumerate(held)
    ]
    if places is None:
        places = range(mesh.engine_dp.rank, len(prompts), mesh.engine_dp.size)
    conversations += [
        Conversation(
            key=key,
            prompt=prompts[place],
            group=first_group + place,
            sample_index=sample_index,
            run_seed=run_seed,
            born=(seed_step, first_group + place),
            max_tokens=max_tokens,
            **common,
        )
        for key, (place, sample_index) in enumerate(
            ((place, sample_index) for place in places for sample_index in range(members)),
            start=len(held),
        )
    ]
    rewards: dict[int, float] = {}
    rollouts: dict[int, Rollout] = {}
    reward_results: dict[int, RewardResult] = {}
    environments = conversation_setup.environments
    with engine.sampler(policy_version=policy_version) as sampler:
        if engine.is_leader:  # the other ranks of its engine do what they are told
            for conversation in conversations[len(held) :]:
                conversation_setup.environments.open(conversation.key, conversation.prompt)
        resumed = [conversation.go_on() for conversation in conversations[: len(held)]]
        paused = 0
        left = engine.share(len(conversations))
        while left:
            turns, resumed = resumed, []
            ended, paused = paused, 0
            if engine.is_leader:
                idle_s = (
                    _SLICE_S if scorer.outstanding and environments.outstanding else _IDLE_WAIT_S
                )
                for reply in environments.poll(0.0 if sampler.busy else idle_s):
                    conversation = conversations[reply.key]
                    if turn := conversation.hear(reply):
                        turns.append(turn)
                        continue
                    if conversation.is_dropped or conversation.is_paused:
                        ended += 1
                        continue
                    rollouts[reply.key] = conversation.rollout()
                    if conversation.reward is None:
                        scorer.submit(reply.key, rollouts[reply.key], conversation.prompt)
                    else:
                        rewards[reply.key] = conversation.reward
                        ended += 1
                for reward_result in scorer.poll(0.0 if sampler.busy or turns or ended else idle_s):
                    key = cast("int", reward_result.key)
                    reward_results[key], rewards[key] = reward_result, reward_result.reward
                    ended += 1
            turns, ended = engine.share((turns, ended))
            for turn in turns:
                sampler.add(turn)
            for _ in range(ended):
                on_answer()
            left -= ended
            if sampler.busy:
                for sampled in sampler.step():
                    if engine.is_leader:
                        conversations[sampled.key].say(sampled)
                        paused += conversations[sampled.key].is_paused
    if not engine.is_leader:  # ranks of one engine hold the same answers; the first speaks for them
        return CollectedRollouts(rollouts=[], rewards=[])
    counts = conversation_setup.environments.take_counts()
    facts = {} if conversation_setup.environments.one_turn else _facts(conversations, counts)
    facts |= _judged(reward_results, scorer, keep_all)
    if scorer.on_error == "drop" and not keep_all:
        rollouts = {
            key: found
            for key, found in rollouts.items()
            if not (key in reward_results and reward_results[key].failure)
        }
    return CollectedRollouts(
        rollouts=[rollouts[key] for key in sorted(rollouts)],
        rewards=[rewards[key] for key in sorted(rollouts)],
        parts={
            (rollouts[key].group, rollouts[key].sample_index): reward_result.parts
            for key, reward_result in sorted(reward_results.items())
            if key in rollouts
        },
        facts=facts,
        held=tuple(conversation.hold() for conversation in conversations if conversation.is_paused),
    )


def _facts(conversations: Sequence[Conversation], counts: Counter[str]) -> dict[str, Any]:
    """Partials of env/* and of the routes that were asked for twice."""
    over = [c for c in conversations if c.transcript is not None and c.turns and not c.is_paused]
    failed = [c for c in conversations if c.outcome == "error"]
    dropped = sum(c.is_dropped for c in failed)
    differing = [c.transcript.differing for c in over if c.transcript is not None]
    facts: dict[str, Any] = {
        "env/turns_mean": Mean(total=float(sum(c.turns for c in over)), count=float(len(over))),
        "env/max_turns_frac": Mean(
            total=float(sum(c.outcome == "turns" for c in over)), count=float(len(over))
        ),
        "env/dropped": Sum(value=float(dropped)),
        "env/zeroed": Sum(value=float(len(failed) - dropped)),
        **{
            f"env/{name}": Sum(value=float(counts[name]))
            for name in ("calls", "errors", "timeouts", "crashes", "retries")
        },
    }
    if total := sum(slots for _, slots in differing):
        facts["routing/overlap_differs"] = Mean(
            total=float(sum(bad for bad, _ in differing)), count=float(total)
        )
    return facts


def _judged(
    reward_results: Mapping[int, RewardResult], scorer: Scorer, keep_all: bool
) -> dict[str, Any]:
    """Partials of what judging took; none where every component is quick and nothing went wrong."""
    counts = scorer.take_counts()
    failed = float(sum(bool(reward_result.failure) for reward_result in reward_results.values()))
    if scorer.quick and not failed:
        return {}
    dropped = failed if scorer.on_error == "drop" and not keep_all else 0.0
    return {
        "time/judge_mean_s": Mean(
            total=sum(reward_result.seconds for reward_result in reward_results.values()),
            count=float(len(reward_results)),
        ),
        "reward/dropped": Sum(value=dropped),
        "reward/zeroed": Sum(value=failed - dropped),
        **{
            f"reward/{name}": Sum(value=float(counts[name]))
            for name in ("calls", "errors", "timeouts", "crashes", "retries")
        },
    }


def rollout_metrics(answers: CollectedRollouts) -> dict[str, Any]:
    """Partials of reward/* and rollout/* for this rank's answers."""
    rewards, count = answers.rewards, float(len(answers.rewards))
    by_group: dict[int, list[float]] = {}
    for rollout, reward in zip(answers.rollouts, rewards, strict=True):
        by_group.setdefault(rollout.group, []).append(reward)
    groups = list(by_group.values())
    parts: dict[str, list[float]] = {}
    for found in answers.parts.values():
        for name, part in found.items():
            parts.setdefault(name, []).append(part)
    response_tokens = float(sum(rollout.num_response_tokens for rollout in answers.rollouts))
    truncated = float(sum(rollout.finish_reason == "length" for rollout in answers.rollouts))
    return {
        "reward/mean": Mean(total=sum(rewards), count=count),
        "reward/std": StandardDeviation(tuple(rewards)),
        **{
            f"reward/{name}/mean": Mean(total=sum(found), count=float(len(found)))
            for name, found in parts.items()
        },
        "reward/group_zero_std_frac": Mean(
            total=float(sum(max(group) == min(group) for group in groups)), count=float(len(groups))
        ),
        "rollout/response_tokens_mean": Mean(total=response_tokens, count=count),
        "rollout/truncated_frac": Mean(total=truncated, count=count),
        "rollout/tokens": Sum(
            value=float(sum(len(rollout.tokens_T) for rollout in answers.rollouts))
        ),
    }
