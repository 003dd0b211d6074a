"""One round of conversations: shared out over the engines, all in flight at once, each judged while others still run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from r3.chat import Chat, ChatError
from r3.config import EnvConfig
from r3.diagnostics import Mean, StandardDeviation, Sum
from r3.engine import Engine, Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.envs.run import Environments, Reply
from r3.mesh import Mesh
from r3.types import Message, Prompt, Rollout

Judge = Callable[[Rollout, Prompt], float]

# While nothing is in flight and environments work. The ranks of one engine meet at least this often.
_IDLE_WAIT_S = 1.0


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
class Answers:
    """This rank's rollouts and their rewards, parallel lists in order of group and member.

    Empty on ranks that only lend their device to another rank's engine. Groups are whole, but for conversations whose
    environment failed (`env.on_error` "drop"). `facts` are metric partials of the conversations themselves.
    """

    rollouts: list[Rollout]
    rewards: list[float]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """All of several rounds, whose groups have numbers of their own; facts aside."""
        return cls(
            rollouts=[rollout for part in parts for rollout in part.rollouts],
            rewards=[reward for part in parts for reward in part.rewards],
        )

    def of_groups(self, groups: frozenset[int]) -> Answers:
        """Those of some groups; facts aside."""
        kept = [pair for pair in zip(self.rollouts, self.rewards, strict=True) if pair[0].group in groups]
        return Answers(rollouts=[rollout for rollout, _ in kept], rewards=[reward for _, reward in kept])


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
        max_tokens: tokens of a conversation after its first messages, sampled and observed.
        talk: the environment; None = one question, one answer.
        keep_all: conversations that `env.on_error` would leave out end with reward 0 instead, and routes may be absent.

    Raises:
        EnvironmentFailed: an environment failed and that stops the run.
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
    conversations = [
        _Conversation(
            engine=engine,
            talk=talk,
            key=key,
            prompt=prompts[place],
            group=first_group + place,
            member=member,
            seed_of=partial(_turn_seed, run_seed, seed_step, prompts[place].id, first_group + place, member),
            sampling=sampling,
            max_tokens=max_tokens,
            on_error=settings.on_error,
            keep=keep_all,
        )
        for key, (place, member) in enumerate(
            (place, member)
            for place in range(mesh.engine_dp.rank, len(prompts), mesh.engine_dp.size)
            for member in range(members)
        )
    ]
    rewards: dict[int, float] = {}
    rollouts: dict[int, Rollout] = {}
    with engine.sampler(version=version) as sampler:
        if engine.speaks:  # the other ranks of its engine do what they are told
            for conversation in conversations:
                talk.environments.open(conversation.key, conversation.prompt)
        left = len(conversations)
        while left:
            turns: list[Turn] = []
            ended = 0
            if engine.speaks:
                for reply in talk.environments.poll(0.0 if sampler.busy else _IDLE_WAIT_S):
                    conversation = conversations[reply.key]
                    if turn := conversation.hear(reply):
                        turns.append(turn)
                        continue
                    ended += 1
                    if not conversation.is_dropped:
                        rollouts[reply.key] = conversation.rollout()
                        rewards[reply.key] = conversation.reward(judge, rollouts[reply.key])
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
    if not engine.speaks:  # ranks of one engine hold the same answers; the first speaks for them
        return Answers(rollouts=[], rewards=[])
    counts = talk.environments.take_counts()
    return Answers(
        rollouts=[rollouts[key] for key in sorted(rollouts)],
        rewards=[rewards[key] for key in sorted(rollouts)],
        facts={} if talk.environments.one_turn else _facts(conversations, counts),
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
        seed_of: Callable[[int], int],
        sampling: Sampling,
        max_tokens: int,
        on_error: Literal["drop", "zero", "stop"],
        keep: bool,
    ) -> None:
        self.key, self.prompt, self.group, self.member = key, prompt, group, member
        self.turns = 0
        self.outcome = ""  # how it ended: "stop", "length", "turns" or "error"
        self.transcript: Transcript | None = None
        self._engine, self._talk = engine, talk
        self._seed_of, self._sampling = seed_of, sampling
        self._longest = max_tokens  # of the whole conversation in tokens, once its first messages are known
        self._on_error, self._keep = on_error, keep
        self._rewards: list[float] = []
        self._last_turn = 0
        self._cut = False

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
        self._last_turn = len(self.transcript.tokens)
        self.transcript.take(sampled)
        self.turns += 1
        self._cut = sampled.finish_reason == "length"
        said = sampled.tokens_T
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

    def reward(self, judge: Judge, rollout: Rollout) -> float:
        """What the environment gave, summed over turns; the judge's word where it gave nothing; 0 after a failure."""
        if self.outcome == "error":
            return 0.0
        return sum(self._rewards) if self._rewards else judge(rollout, self.prompt)

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
        self.transcript.observe(tokens)
        return self._turn()

    def _turn(self) -> Turn:
        assert self.transcript is not None
        limit = self._talk.environments.settings.max_turn_tokens
        return Turn(
            key=self.key,
            tokens_T=tuple(self.transcript.tokens),
            first_row=self.transcript.first_row,
            seed=self._seed_of(self.turns),
            max_tokens=min(self._room(), limit or self._room()),
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
    over = [c for c in conversations if c.transcript is not None and c.turns]
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


def rollout_metrics(answers: Answers) -> dict[str, Any]:
    """Partials of reward/* and rollout/* for this rank's answers."""
    rewards, count = answers.rewards, float(len(answers.rewards))
    by_group: dict[int, list[float]] = {}
    for rollout, reward in zip(answers.rollouts, rewards, strict=True):
        by_group.setdefault(rollout.group, []).append(reward)
    groups = list(by_group.values())
    response_tokens = float(sum(rollout.num_response_tokens for rollout in answers.rollouts))
    truncated = float(sum(rollout.finish_reason == "length" for rollout in answers.rollouts))
    return {
        "reward/mean": Mean(total=sum(rewards), count=count),
        "reward/std": StandardDeviation(tuple(rewards)),
        "reward/group_zero_std_frac": Mean(
            total=float(sum(max(group) == min(group) for group in groups)), count=float(len(groups))
        ),
        "rollout/response_tokens_mean": Mean(total=response_tokens, count=count),
        "rollout/truncated_frac": Mean(total=truncated, count=count),
        "rollout/tokens": Sum(value=float(sum(len(rollout.tokens_T) for rollout in answers.rollouts))),
    }
