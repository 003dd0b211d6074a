"""One conversation: what was sampled so far, and what comes next."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from r3.config import EnvConfig
from r3.engine import Engine, Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.envs.chat import Chat, ChatError
from r3.envs.runner import Environments, Reply
from r3.types import Message, Prompt, Rollout


class EnvironmentFailed(RuntimeError):
    """An environment failed and `env.on_error` is "stop"; says on which sample."""


@dataclass(frozen=True, kw_only=True)
class ConversationSetup:
    """What a conversation is: the environments, and the template that puts their messages behind the model's.

    `chat` is None where every conversation is one turn, which needs no such template.
    """

    environments: Environments
    chat: Chat | None

    @classmethod
    def of(cls, settings: EnvConfig, tokenizer: Any, model_path: str) -> ConversationSetup:
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


_SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id")


def for_people(message: Message) -> Message:
    """The keys of a message that a dump keeps, as plain JSON values: an environment may put anything into a message."""
    kept = {name: message[name] for name in _SHOWN if message.get(name) is not None}
    return dict(json.loads(json.dumps(kept, default=str)))


def _turn_seed(
    run_seed: int, step: int, prompt_id: str, group: int, sample_index: int, turn: int
) -> int:
    # The group too: at the border of two epochs, or in a refill, one question may come twice in a step.
    name = f"{prompt_id}/{group}/{turn}" if turn else f"{prompt_id}/{group}"
    return sampling_seed(run_seed, step, name, sample_index)


class Conversation:
    """One conversation: what was said so far, and what comes next."""

    def __init__(
        self,
        *,
        engine: Engine,
        conversation_setup: ConversationSetup,
        key: int,
        prompt: Prompt,
        group: int,
        sample_index: int,
        run_seed: int,
        born: tuple[int, int],
        sampling: Sampling,
        max_tokens: int,
        budget: int,
        on_error: Literal["drop", "zero", "stop"],
        keep: bool,
    ) -> None:
        self.key, self.prompt, self.group, self.sample_index = key, prompt, group, sample_index
        self.turns = 0
        self.outcome = ""  # how it ended: "stop", "length", "turns" or "error"
        self.transcript: Transcript | None = None
        self._engine, self._talk = engine, conversation_setup
        self._sampling, self._run_seed, self._born = sampling, run_seed, born
        self._longest = (
            max_tokens  # of the whole conversation in tokens, once its first messages are known
        )
        self._on_error, self._keep = on_error, keep
        self._rewards: list[float] = []
        self._messages: list[Message] = []
        self._turn_rewards: list[float | None] = []
        self._last_turn = 0
        self._cut = False
        # Interruption: what is left of the budget, whether its end cut the model's message, what was heard and not answered.
        self.is_paused = False
        self._budget, self._left = budget, budget
        self._may_cut = self._midway = False
        self._heard: tuple[int, ...] = ()
        self._asked = 0

    @classmethod
    def resumed(cls, held: Held, key: int, run_seed: int, **common: Any) -> Conversation:
        """One that was interrupted."""
        conversation = cls(
            key=key,
            prompt=held.prompt,
            group=held.rollout.group,
            sample_index=held.rollout.sample_index,
            run_seed=run_seed,
            born=held.born,
            max_tokens=held.longest,
            **common,
        )
        conversation.turns, conversation._asked = held.turns, held.asked
        conversation._last_turn, conversation._midway = held.last_turn, held.midway
        conversation._heard, conversation._rewards = held.heard, list(held.rewards)
        conversation._messages = list(held.rollout.messages)
        conversation._turn_rewards = list(held.rollout.turn_rewards)
        conversation.transcript = Transcript.resumed(
            conversation._engine, held.rollout, who=conversation.who
        )
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
        return f"rollout {self.prompt.id}/{self.sample_index} of step {self._engine.policy_version}"

    def hear(self, reply: Reply) -> Turn | None:
        """Take the environment's word; the next turn, or None when the conversation is over."""
        if reply.failure is not None:
            return self._fail(f"{reply.failure.kind}: {reply.failure.text}")
        try:
            if reply.opened is not None:
                return self._open(reply.opened)
            assert reply.step is not None and self.transcript is not None
            self._turn_rewards.append(reply.step.reward)
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
        self._messages.append(for_people(message))
        self._talk.environments.send(self.key, message)

    @property
    def is_dropped(self) -> bool:
        """Whether nothing is trained on it: by `env.on_error`, or because it failed before the model said anything."""
        return (
            self.outcome == "error"
            and not self._keep
            and (self._on_error == "drop" or not self.turns)
        )

    def rollout(self) -> Rollout:
        """The conversation when it is over; the prompt alone when it failed before it began."""
        if self.transcript is None:
            self.transcript = Transcript(self._engine, self.prompt.tokens_T, who=self.who)
            self._last_turn = len(self.prompt.tokens_T)
        rollout = self.transcript.rollout(
            self.prompt,
            group=self.group,
            sample_index=self.sample_index,
            finish_reason=self.outcome,
            last_turn=self._last_turn,
        )
        if self._talk.environments.one_turn:  # the prompt and the response say it all
            return rollout
        return replace(
            rollout, messages=tuple(self._messages), turn_rewards=tuple(self._turn_rewards)
        )

    @property
    def reward(self) -> float | None:
        """What the environment gave, summed over turns; 0 after a failure; None where it gave nothing: ask the judge."""
        if self.outcome == "error":
            return 0.0
        return sum(self._rewards) if self._rewards else None

    def _open(self, messages: tuple[Message, ...]) -> Turn | None:
        tokens: Sequence[int] = (
            self.prompt.tokens_T
        )  # with the tools of its row, or else the environment's
        if self._talk.chat and messages != self.prompt.messages:
            tokens = self._talk.chat.first(messages)
        self._messages = [for_people(message) for message in messages]
        self.transcript = Transcript(self._engine, tokens, who=self.who)
        self._longest = min(len(tokens) + self._longest, self._engine.max_model_len)
        if self._room() < 1:
            limit = self._engine.max_model_len
            return self._fail(
                f"its first messages have {len(tokens)} tokens, a conversation at most {limit}"
            )
        return self._turn()

    def _observe(self, messages: tuple[Message, ...]) -> Turn | None:
        assert self._talk.chat is not None and self.transcript is not None
        ended = self.transcript.tokens[-1] == self._talk.chat.end
        tokens = self._talk.chat.following(messages, ended=ended)
        # What the model could not answer any more is left out: nothing would be trained on it, and it has no routes.
        if self._room() - len(tokens) < 1:
            return self._end("length")
        self._messages += [for_people(message) for message in messages]
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
            seed=_turn_seed(
                self._run_seed, step, self.prompt.id, group, self.sample_index, self._asked - 1
            ),
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
