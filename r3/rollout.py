"""One round of conversations: shared out over the engines, all in flight at once, each judged while others still run."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from r3.chat import Chat, ChatError
from r3.config import EnvConfig
from r3.diagnostics import Mean, StandardDeviation, Sum
from r3.engine import Engine, Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.envs.run import Environments, Reply
from r3.mesh import Mesh
from r3.rewards.judge import Judge, Verdict
from r3.types import Message, Prompt, Rollout

# While nothing is in flight and environments work. The ranks of one engine meet at least this often.
_IDLE_WAIT_S = 1.0
_SLICE_S = 0.01  # between looks at environments and judges, when both are waited for


class EnvironmentFailed(RuntimeError):
    """An environment failed and `env.on_error` is "stop"; says on which sample."""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """What a conversation is: the environments, and the template that puts their messages behind the model's.

    `chat` is None where every conversation is one turn, which needs no such template.
    """

    environments: Environments
    chat: Chat | None

    @classmethod
    def of(cls, settings: EnvConfig, tokenizer: Any, model_path: str) -> Talk:
        """Load the environment and check the template; raises ConfigError."""
        environments = Environments(settings)
        chat = None if environments.one_turn else Chat(tokenizer, model_path, environments.tools)
        return cls(environments=environments, chat=chat)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A conversation that was interrupted, and where it goes on.

    Attributes:
        rollout: the conversation so far, by its group's number in the step; nothing to train on yet.
        born: the step and the number in it that its random streams are named after.
        turns: messages of the model that are complete; `asked`: continuations that the engine was asked for.
        longest: tokens it may have; `last_turn`: where the model's last message begins, `midway` if that is not complete.
        heard: tokens of the environment's messages that come next.
        rewards: of its turns; `environment`: its state, as `Environments.suspend` gives it.
    """

    prompt: Prompt
    rollout: Rollout
    born: tuple[int, int]
    turns: int
    asked: int
    longest: int
    last_turn: int
    midway: bool
    heard: tuple[int, ...]
    rewards: tuple[float, ...]
    environment: bytes


@dataclass(frozen=True, kw_only=True)
class Answers:
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
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """All of several rounds, whose groups have numbers of their own; facts and what is held aside."""
        return cls(
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            rewards=[reward for part in parts for reward in part.rewards],
            parts={name: found for part in parts for name, found in part.parts.items()},
        )

    def of_groups(self, groups: frozenset[int]) -> Answers:
        """Those of some groups; facts and what is held aside."""
        kept = [pair for pair in zip(self.rollouts, self.rewards, strict=True) if pair[0].group in groups]
        return Answers(
            rollouts=[rollout for rollout, _ in kept],
            rewards=[reward for _, reward in kept],
            parts={name: found for name, found in self.parts.items() if name[0] in groups},
        )

    def in_order(self) -> Answers:
        """In order of group and member; facts and what is held aside."""
        pairs = sorted(
            zip(self.rollouts, self.rewards, strict=True), key=lambda pair: (pair[0].group, pair[0].member)
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
    judge: Judge,
    mesh: Mesh,
    *,
    members: int,
    version: int,
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
    talk: Talk | None = None,
    keep_all: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> Answers:
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
    talk = talk or Talk.of(EnvConfig(), engine.tokenizer, "")
    settings = talk.environments.settings
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=talk.environments.stop,
        stop_tokens=(talk.chat.end,) if talk.chat else (),
    )
    common: dict[str, Any] = {
        "engine": engine,
        "talk": talk,
        "sampling": sampling,
        "budget": budget,
        "on_error": settings.on_error,
        "keep": keep_all,
    }
    conversations = [_Conversation.resumed(each, key, run_seed, **common) for key, each in enumerate(held)]
    if places is None:
        places = range(mesh.engine_dp.rank, len(prompts), mesh.engine_dp.size)
    conversations += [
        _Conversation(
            key=key,
            prompt=prompts[place],
            group=first_group + place,
            member=member,
            run_seed=run_seed,
            born=(seed_step, first_group + place),
            max_tokens=max_tokens,
            **common,
        )
        for key, (place, member) in enumerate(
            ((place, member) for place in places for member in range(members)), start=len(held)
        )
    ]
    rewards: dict[int, float] = {}
    rollouts: dict[int, Rollout] = {}
    verdicts: dict[int, Verdict] = {}
    environments = talk.environments
    with engine.sampler(version=version) as sampler:
        if engine.speaks:  # the other ranks of its engine do what they are told
            for conversation in conversations[len(held) :]:
                talk.environments.open(conversation.key, conversation.prompt)
        resumed = [conversation.go_on() for conversation in conversations[: len(held)]]
        paused = 0
        left = engine.share(len(conversations))
        while left:
            turns, resumed = resumed, []
            ended, paused = paused, 0
            if engine.speaks:
                idle_s = _SLICE_S if judge.outstanding and environments.outstanding else _IDLE_WAIT_S
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
                        judge.submit(reply.key, rollouts[reply.key], conversation.prompt)
                    else:
                        rewards[reply.key] = conversation.reward
                        ended += 1
                for verdict in judge.poll(0.0 if sampler.busy or turns or ended else idle_s):
                    key = cast("int", verdict.key)
                    verdicts[key], rewards[key] = verdict, verdict.reward
                    ended += 1
            turns, ended = engine.share((turns, ended))
            for turn in turns:
                sampler.add(turn)
            for _ in range(ended):
                on_answer()
            left -= ended
            if sampler.busy:
                for sampled in sampler.step():
                    if engine.speaks:
                        conversations[sampled.key].say(sampled)
                        paused += conversations[sampled.key].is_paused
    if not engine.speaks:  # ranks of one engine hold the same answers; the first speaks for them
        return Answers(rollouts=[], rewards=[])
    counts = talk.environments.take_counts()
    facts = {} if talk.environments.one_turn else _facts(conversations, counts)
    facts |= _judged(verdicts, judge, keep_all)
    if judge.on_error == "drop" and not keep_all:
        rollouts = {
            key: found for key, found in rollouts.items() if not (key in verdicts and verdicts[key].failure)
        }
    return Answers(
        rollouts=[rollouts[key] for key in sorted(rollouts)],
        rewards=[rewards[key] for key in sorted(rollouts)],
        parts={
            (rollouts[key].group, rollouts[key].member): verdict.parts
            for key, verdict in sorted(verdicts.items())
            if key in rollouts
        },
        facts=facts,
        held=tuple(conversation.hold() for conversation in conversations if conversation.is_paused),
    )


def _turn_seed(run_seed: int, step: int, prompt_id: str, group: int, member: int, turn: int) -> int:
    # The group too: at the border of two epochs, or in a refill, one question may come twice in a step.
    name = f"{prompt_id}/{group}/{turn}" if turn else f"{prompt_id}/{group}"
    return sampling_seed(run_seed, step, name, member)


class _Conversation:
    """One conversation: what was said so far, and what comes next."""

    def __init__(
        self,
        *,
        engine: Engine,
        talk: Talk,
        key: int,
        prompt: Prompt,
        group: int,
        member: int,
        run_seed: int,
        born: tuple[int, int],
        sampling: Sampling,
        max_tokens: int,
        budget: int,
        on_error: Literal["drop", "zero", "stop"],
        keep: bool,
    ) -> None:
        self.key, self.prompt, self.group, self.member = key, prompt, group, member
        self.turns = 0
        self.outcome = ""  # how it ended: "stop", "length", "turns" or "error"
        self.transcript: Transcript | None = None
        self._engine, self._talk = engine, talk
        self._sampling, self._run_seed, self._born = sampling, run_seed, born
        self._longest = max_tokens  # of the whole conversation in tokens, once its first messages are known
        self._on_error, self._keep = on_error, keep
        self._rewards: list[float] = []
        self._last_turn = 0
        self._cut = False
        # Interruption: what is left of the budget, whether its end cut the model's message, what was heard and not answered.
        self.is_paused = False
        self._budget, self._left = budget, budget
        self._may_cut = self._midway = False
        self._heard: tuple[int, ...] = ()
        self._asked = 0

    @classmethod
    def resumed(cls, held: Held, key: int, run_seed: int, **common: Any) -> _Conversation:
        """One that was interrupted."""
        conversation = cls(
            key=key,
            prompt=held.prompt,
            group=held.rollout.group,
            member=held.rollout.member,
            run_seed=run_seed,
            born=held.born,
            max_tokens=held.longest,
            **common,
        )
        conversation.turns, conversation._asked = held.turns, held.asked
        conversation._last_turn, conversation._midway = held.last_turn, held.midway
        conversation._heard, conversation._rewards = held.heard, list(held.rewards)
        conversation.transcript = Transcript.resumed(conversation._engine, held.rollout, who=conversation.who)
        conversation._talk.environments.resume(key, held.environment)
        return conversation

    def go_on(self) -> Turn:
        """The first turn after an interruption."""
        assert self.transcript is not None
        self.transcript.observe(self._heard)
        self._heard = ()
        return self._turn()

    def hold(self) -> Held:
        """What is kept of an interrupted conversation."""
        try:
            state = self._talk.environments.suspend(self.key)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvironmentFailed(
                f"{self.who}: interrupted by rollout.step_token_budget, and its environment cannot be kept ({error})\n"
                "  write one that can be pickled, or switch the budget off with --rollout.step_token_budget 0"
            ) from error
        self.outcome = "interrupted"
        return Held(
            prompt=self.prompt,
            rollout=self.rollout(),
            born=self._born,
            turns=self.turns,
            asked=self._asked,
            longest=self._longest,
            last_turn=self._last_turn,
            midway=self._midway,
            heard=self._heard,
            rewards=tuple(self._rewards),
            environment=state,
        )

    @property
    def who(self) -> str:
        return f"rollout {self.prompt.id}/{self.member} of step {self._engine.version}"

    def hear(self, reply: Reply) -> Turn | None:
        """Take the environment's word; the next turn, or None when the conversation is over."""
        if reply.failure is not None:
            return self._fail(f"{reply.failure.kind}: {reply.failure.text}")
        try:
            if reply.opened is not None:
                return self._open(reply.opened)
            assert reply.step is not None and self.transcript is not None
            if reply.step.reward is not None:
                self._rewards.append(reply.step.reward)
            if reply.step.done:
                return self._end("length" if self._cut else "stop")
            if self._room() < 1:
                return self._end("length")
            if self.turns == self._talk.environments.settings.max_turns:
                return self._end("turns")
            return self._observe(reply.step.messages)
        except ChatError as error:
            return self._fail(str(error))

    def say(self, sampled: Sampled) -> None:
        """Take what the model said, and give it to the environment."""
        assert self.transcript is not None
        if not self._midway:
            self._last_turn = len(self.transcript.tokens)
        self.transcript.take(sampled)
        self._left -= len(sampled.tokens_T)
        self.is_paused = self._midway = self._may_cut and sampled.finish_reason == "length"
        if self._midway:
            return
        self.turns += 1
        self._cut = sampled.finish_reason == "length"
        said = self.transcript.tokens[self._last_turn :]
        ends = {*self._sampling.stop_tokens, self._engine.tokenizer.eos_token_id}
        text = self._engine.tokenizer.decode(said[:-1] if said[-1] in ends else said)
        message: Message = {
            "role": "assistant",
            "content": text,
            "finish_reason": sampled.finish_reason,
        }
        self._talk.environments.send(self.key, message)

    @property
    def is_dropped(self) -> bool:
        """Whether nothing is trained on it: by `env.on_error`, or because it failed before the model said anything."""
        return self.outcome == "error" and not self._keep and (self._on_error == "drop" or not self.turns)

    def rollout(self) -> Rollout:
        """The conversation when it is over; the prompt alone when it failed before it began."""
        if self.transcript is None:
            self.transcript = Transcript(self._engine, self.prompt.tokens_T, who=self.who)
            self._last_turn = len(self.prompt.tokens_T)
        return self.transcript.rollout(
            self.prompt,
            group=self.group,
            member=self.member,
            finish_reason=self.outcome,
            last_turn=self._last_turn,
        )

    @property
    def reward(self) -> float | None:
        """What the environment gave, summed over turns; 0 after a failure; None where it gave nothing: ask the judge."""
        if self.outcome == "error":
            return 0.0
        return sum(self._rewards) if self._rewards else None

    def _open(self, messages: tuple[Message, ...]) -> Turn | None:
        tokens: Sequence[int] = self.prompt.tokens_T  # with the tools of its row, or else the environment's
        if self._talk.chat and messages != self.prompt.messages:
            tokens = self._talk.chat.first(messages)
        self.transcript = Transcript(self._engine, tokens, who=self.who)
        self._longest = min(len(tokens) + self._longest, self._engine.max_model_len)
        if self._room() < 1:
            limit = self._engine.max_model_len
            return self._fail(f"its first messages have {len(tokens)} tokens, a conversation at most {limit}")
        return self._turn()

    def _observe(self, messages: tuple[Message, ...]) -> Turn | None:
        assert self._talk.chat is not None and self.transcript is not None
        ended = self.transcript.tokens[-1] == self._talk.chat.end
        tokens = self._talk.chat.following(messages, ended=ended)
        # What the model could not answer any more is left out: nothing would be trained on it, and it has no routes.
        if self._room() - len(tokens) < 1:
            return self._end("length")
        if self._budget and self._left < 1:
            self.is_paused, self._heard = True, tuple(tokens)
            return None
        self.transcript.observe(tokens)
        return self._turn()

    def _turn(self) -> Turn:
        assert self.transcript is not None
        said = len(self.transcript.tokens) - self._last_turn if self._midway else 0
        limit = self._talk.environments.settings.max_turn_tokens
        most = min(self._room(), limit - said if limit else self._room())
        self._may_cut = bool(self._budget) and not self._sampling.stop and self._left < most
        self._asked += 1
        step, group = self._born
        return Turn(
            key=self.key,
            tokens_T=tuple(self.transcript.tokens),
            first_row=self.transcript.first_row,
            seed=_turn_seed(self._run_seed, step, self.prompt.id, group, self.member, self._asked - 1),
            max_tokens=self._left if self._may_cut else most,
            sampling=self._sampling,
        )

    def _room(self) -> int:
        assert self.transcript is not None
        return self._longest - len(self.transcript.tokens)

    def _end(self, outcome: str) -> Turn | None:
        """Over: no next turn."""
        self.outcome = outcome
        self._talk.environments.forget(self.key)
        return None

    def _fail(self, why: str) -> Turn | None:
        if self._on_error == "stop":
            raise EnvironmentFailed(
                f"{self.who}, turn {self.turns}: the environment failed ({why})\n"
                "  env.on_error drop or zero goes on without it"
            )
        return self._end("error")


def _facts(conversations: Sequence[_Conversation], counts: Counter[str]) -> dict[str, Any]:
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


def _judged(verdicts: Mapping[int, Verdict], judge: Judge, keep_all: bool) -> dict[str, Any]:
    """Partials of what judging took; none where every component is quick and nothing went wrong."""
    counts = judge.take_counts()
    failed = float(sum(bool(verdict.failure) for verdict in verdicts.values()))
    if judge.quick and not failed:
        return {}
    dropped = failed if judge.on_error == "drop" and not keep_all else 0.0
    return {
        "time/judge_mean_s": Mean(
            total=sum(verdict.seconds for verdict in verdicts.values()), count=float(len(verdicts))
        ),
        "reward/dropped": Sum(value=dropped),
        "reward/zeroed": Sum(value=failed - dropped),
        **{
            f"reward/{name}": Sum(value=float(counts[name]))
            for name in ("calls", "errors", "timeouts", "crashes", "retries")
        },
    }


def rollout_metrics(answers: Answers) -> dict[str, Any]:
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
        "rollout/tokens": Sum(value=float(sum(len(rollout.tokens_T) for rollout in answers.rollouts))),
    }
