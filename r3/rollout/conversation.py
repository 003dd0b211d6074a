"""One conversation: the tokens so far, and the turn that comes next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from r3.config import EnvConfig
from r3.engine import (
    CaptureSpec,
    Sampled,
    Sampling,
    Transcript,
    Turn,
    message_parser,
    sampling_seed,
)
from r3.envs import find, is_workflow
from r3.envs.chat import Chat, ChatError, Renderer
from r3.envs.runner import Environments, Reply, StateError
from r3.envs.tool_calls import Parser, built_in
from r3.envs.workflow import Workflow, Workflows
from r3.types import Message, Prompt, Rollout

# More characters per token that is left are taken not to fit, without counting their tokens: that
# would take the engine's time. Tokens of text have three or four characters.
CHARACTERS_PER_TOKEN = 32

# Keys of a message that dumps keep.
_READABLE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class EnvironmentFailed(RuntimeError):
    """An environment failed and `env.on_error` is "stop". The message names the sample."""


@dataclass(frozen=True, kw_only=True)
class ConversationSetup:
    """What conversations are made of.

    Attributes:
        environments: one environment per conversation in flight, or one workflow.
        tokenizer: the policy's.
        chat: renders the messages that follow a message of the model. None if every conversation
            is one turn, which needs no such template, and for workflows.
        renderer: renders whole conversations of workflows; None for environments.
        parser: reads tool calls and reasoning in messages of the model.
    """

    environments: Environments | Workflows
    tokenizer: Any
    chat: Chat | None
    renderer: Renderer | None = None
    parser: Parser = built_in

    @classmethod
    def of(
        cls,
        settings: EnvConfig,
        tokenizer: Any,
        model_path: str,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> ConversationSetup:
        """Load the environment and check the chat template.

        Raises:
            ConfigError: the environment, the chat template or a parser cannot be used.
        """
        found = find(settings)
        parser = message_parser(settings, tokenizer, template_kwargs)
        if is_workflow(found):
            return cls(
                environments=Workflows(settings, cast("type[Workflow]", found)),
                tokenizer=tokenizer,
                chat=None,
                renderer=Renderer(tokenizer, template_kwargs),
                parser=parser,
            )
        environments = Environments(settings)
        chat = None
        if not environments.one_turn:
            chat = Chat(tokenizer, model_path, environments.tools, template_kwargs)
        return cls(environments=environments, tokenizer=tokenizer, chat=chat, parser=parser)

    @property
    def environment_calls(self) -> Environments:
        """The environments, where there is no workflow."""
        assert isinstance(self.environments, Environments), "a workflow has no environments"
        return self.environments

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end the model's turn, besides the tokenizer's end of sequence."""
        if self.chat is not None:
            return (self.chat.end,)
        return (self.renderer.end[1],) if self.renderer and self.renderer.end else ()


@dataclass(frozen=True, kw_only=True)
class ConversationRules:
    """What all conversations of one round share.

    Attributes:
        sampling: how tokens are drawn and when a turn ends.
        capture: what transcripts need to know of the engine.
        run_seed: seed of the run, from which every turn's seed is derived.
        max_response_tokens: maximum tokens after the first messages, sampled and observed.
        max_model_len: maximum tokens of a conversation in the engine.
        token_budget: tokens that a conversation may sample in this round before it is suspended;
            0 is no budget. With stop strings a message is never cut, since a stop string could
            span the cut: the conversation is suspended before its next message.
        keep_failed: failed conversations end with reward 0, whatever `env.on_error` says.
        needs_reward: an environment that ends a conversation without any reward has failed.
    """

    setup: ConversationSetup
    sampling: Sampling
    capture: CaptureSpec
    run_seed: int
    max_response_tokens: int
    max_model_len: int
    token_budget: int = 0
    keep_failed: bool = False
    needs_reward: bool = False


@dataclass(kw_only=True, slots=True)
class Progress:
    """Everything that resuming a conversation needs besides its tokens and its environment.

    Attributes:
        seed_origin: step in which the conversation began, and its group in that step. They name
            its random streams, also after the group got another number.
        max_tokens_total: maximum tokens of the conversation, first messages included.
        turns: complete messages of the model.
        turns_requested: continuations requested from the engine; a message that the token budget
            interrupted takes several.
        last_turn: index of the first token of the model's last message.
        mid_turn: whether that message is incomplete.
        pending_observation: tokens of the environment's messages that come next.
        metrics: what the environment reported so far, by full names.
    """

    seed_origin: tuple[int, int]
    max_tokens_total: int = 0
    turns: int = 0
    turns_requested: int = 0
    last_turn: int = 0
    mid_turn: bool = False
    pending_observation: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SuspendedConversation:
    """A conversation that the token budget interrupted and that a later step resumes.

    Attributes:
        rollout: the tokens so far, under its group's number in the step. It is not trained on.
        environment: state of its environment, as `Environments.suspend` returns it.
    """

    prompt: Prompt
    rollout: Rollout
    progress: Progress
    environment: bytes


def readable_message(message: Message) -> Message:
    """Return the keys of a message that dumps keep, as plain JSON values.

    An environment may put anything into its messages.
    """
    kept = {name: message[name] for name in _READABLE_KEYS if message.get(name) is not None}
    return dict(json.loads(json.dumps(kept, default=str)))


def _num_characters(messages: Sequence[Message]) -> int:
    return sum(len(str(part)) for message in messages for part in message.values())


class Conversation:
    """One conversation in flight, driven by replies of its environment and samples of the engine.

    Attributes:
        key: names the conversation in its round.
        transcript: its tokens; None until the environment's first messages arrived.
        outcome: how it ended: "stop", "length", "turns" or "error"; empty while it runs.
        ended_by_environment: whether the environment ended it, not the limits of turns and tokens.
        is_suspended: whether the token budget interrupted it.
    """

    def __init__(
        self,
        rules: ConversationRules,
        *,
        key: int,
        prompt: Prompt,
        group: int,
        sample_index: int,
        progress: Progress,
    ) -> None:
        self.key, self.prompt, self.group, self.sample_index = key, prompt, group, sample_index
        self.progress = progress
        self.outcome = ""
        self.ended_by_environment = False
        self.transcript: Transcript | None = None
        self.is_suspended = False
        self._rules = rules
        self._environments = rules.setup.environment_calls
        self._messages: list[Message] = []
        self._turn_rewards: list[float | None] = []
        self._was_cut = False  # the model's last message ran out of tokens
        self._budget_left = rules.token_budget
        self._budget_may_cut = False  # the turn in flight ends at the budget, not at its own limit

    @classmethod
    def resumed(
        cls, suspended: SuspendedConversation, rules: ConversationRules, *, key: int
    ) -> Conversation:
        """Restore a suspended conversation; `resume` requests its next turn, unless it has failed.

        Raises:
            EnvironmentFailed: its environment cannot be restored and `env.on_error` is "stop".
        """
        rollout = suspended.rollout
        conversation = cls(
            rules,
            key=key,
            prompt=suspended.prompt,
            group=rollout.group,
            sample_index=rollout.sample_index,
            progress=replace(suspended.progress),
        )
        conversation._messages = list(rollout.messages)
        conversation._turn_rewards = list(rollout.turn_rewards)
        conversation.transcript = Transcript.resumed(rules.capture, rollout, who=conversation.who)
        try:
            conversation._environments.resume(key, suspended.environment)
        except StateError as error:
            conversation._fail(f"it cannot be restored: {error}")
        return conversation

    def resume(self) -> Turn:
        """Return the first turn of a restored conversation."""
        assert self.transcript is not None
        self.transcript.observe(self.progress.pending_observation)
        self.progress.pending_observation = ()
        return self._next_turn()

    def suspend(self) -> SuspendedConversation | None:
        """Return what a later step needs to resume the conversation; None if it has failed.

        Raises:
            EnvironmentFailed: the environment cannot be pickled and `env.on_error` is "stop".
        """
        try:
            environment = self._environments.suspend(self.key)
        except StateError as error:
            self.is_suspended = False
            self._fail(
                f"rollout.step_token_budget interrupted the conversation, and the environment "
                f"cannot be pickled: {error}; --rollout.step_token_budget 0 needs no pickle"
            )
            return None
        self.outcome = "suspended"
        return SuspendedConversation(
            prompt=self.prompt,
            rollout=self.rollout(),
            progress=self.progress,
            environment=environment,
        )

    @property
    def who(self) -> str:
        """Name of the conversation in messages."""
        version = self._rules.capture.policy_version
        return f"rollout {self.prompt.id}/{self.sample_index} of step {version}"

    def receive_reply(self, reply: Reply) -> Turn | None:
        """Take a reply of the environment; return the next turn, or None if there is none now.

        Raises:
            EnvironmentFailed: the environment failed and `env.on_error` is "stop".
        """
        if reply.failure is not None:
            return self._fail(f"{reply.failure.kind}: {reply.failure.text}")
        try:
            if reply.opened is not None:
                return self._open(reply.opened)
            assert reply.step is not None and self.transcript is not None
            self._turn_rewards.append(reply.step.reward)
            self.progress.metrics = {**self.progress.metrics, **reply.step.metrics}
            if reply.step.done:
                if self._rules.needs_reward and self.environment_reward is None:
                    return self._fail("it ended without a reward, and reward.function needs one")
                self.ended_by_environment = True
                return self._end("length" if self._was_cut else "stop")
            if self._room() < 1:
                return self._end("length")
            if self.progress.turns == self._environments.settings.max_turns:
                return self._end("turns")
            return self._observe(reply.step.messages)
        except ChatError as error:
            return self._fail(str(error))

    def receive_sample(self, sampled: Sampled) -> None:
        """Take sampled tokens; send a complete message to the environment.

        Raises:
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """
        assert self.transcript is not None
        progress = self.progress
        if not progress.mid_turn:
            progress.last_turn = len(self.transcript.tokens)
        self.transcript.append_sample(sampled)
        self._budget_left -= len(sampled.tokens_T)
        progress.mid_turn = self._budget_may_cut and sampled.finish_reason == "length"
        self.is_suspended = progress.mid_turn
        if progress.mid_turn:
            return
        progress.turns += 1
        self._was_cut = sampled.finish_reason == "length"
        tokenizer = self._rules.setup.tokenizer
        tokens = self.transcript.tokens[progress.last_turn :]
        ends = {*self._rules.sampling.stop_tokens, tokenizer.eos_token_id}
        text = tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens)
        message: Message = {
            "role": "assistant",
            "content": text,
            "finish_reason": sampled.finish_reason,
        }
        self._messages.append(readable_message(message))
        # Dumps have the calls as the model wrote them, in the content.
        parse = self._rules.setup.parser(self.prompt.tools or self._environments.tools)
        self._environments.send(self.key, {**message, **parse(text, tokens).fields()})

    @property
    def is_dropped(self) -> bool:
        """Whether it is left out of training.

        `env.on_error` decides for failed conversations, but one that failed before the first
        message of the model is always left out.
        """
        return (
            self.outcome == "error"
            and not self._rules.keep_failed
            and (self._environments.settings.on_error == "drop" or not self.progress.turns)
        )

    def rollout(self) -> Rollout:
        """Return the conversation as a rollout; the prompt alone if it failed before it began."""
        if self.transcript is None:
            self.transcript = Transcript(self._rules.capture, self.prompt.tokens_T, who=self.who)
            self.progress.last_turn = len(self.prompt.tokens_T)
        rollout = self.transcript.rollout(
            self.prompt,
            group=self.group,
            sample_index=self.sample_index,
            finish_reason=self.outcome,
            response=self._rules.setup.tokenizer.decode(
                self.transcript.tokens[self.progress.last_turn :], skip_special_tokens=True
            ),
        )
        if self._environments.one_turn:  # prompt and response are the whole conversation
            return rollout
        return replace(
            rollout,
            messages=tuple(self._messages),
            turn_rewards=tuple(self._turn_rewards),
            metrics={} if self.outcome == "error" else self.progress.metrics,
        )

    @property
    def environment_reward(self) -> float | None:
        """Sum of the rewards that its environment gave; None if it gave none."""
        rewards = [reward for reward in self._turn_rewards if reward is not None]
        return sum(rewards) if rewards else None

    def _open(self, messages: tuple[Message, ...]) -> Turn | None:
        limit = self._rules.max_model_len
        if (size := _num_characters(messages)) > CHARACTERS_PER_TOKEN * limit:
            return self._fail(
                f"its first messages have {size} characters, a conversation at most {limit} tokens"
            )
        # The prompt's own tokens show the tools of its row, or else those of the environment.
        tokens: Sequence[int] = self.prompt.tokens_T
        if self._rules.setup.chat and messages != self.prompt.messages:
            tokens = self._rules.setup.chat.first(messages)
        self._messages = [readable_message(message) for message in messages]
        self.transcript = Transcript(self._rules.capture, tokens, who=self.who)
        self.progress.max_tokens_total = min(len(tokens) + self._rules.max_response_tokens, limit)
        if self._room() < 1:
            return self._fail(
                f"its first messages have {len(tokens)} tokens, a conversation at most {limit}"
            )
        return self._next_turn()

    def _observe(self, messages: tuple[Message, ...]) -> Turn | None:
        chat = self._rules.setup.chat
        assert chat is not None and self.transcript is not None
        if _num_characters(messages) > CHARACTERS_PER_TOKEN * self._room():
            return self._end("length")
        tokens = chat.following(messages, ended=self.transcript.tokens[-1] == chat.end)
        # An observation that leaves no room for a response is left out: it has no routes, and
        # nothing would be trained on it.
        if self._room() - len(tokens) < 1:
            return self._end("length")
        self._messages += [readable_message(message) for message in messages]
        if self._rules.token_budget and self._budget_left < 1:
            self.is_suspended, self.progress.pending_observation = True, tuple(tokens)
            return None
        self.transcript.observe(tokens)
        return self._next_turn()

    def _next_turn(self) -> Turn:
        assert self.transcript is not None
        progress, rules = self.progress, self._rules
        sampled = len(self.transcript.tokens) - progress.last_turn if progress.mid_turn else 0
        limit = self._environments.settings.max_turn_tokens
        max_tokens = min(self._room(), limit - sampled if limit else self._room())
        self._budget_may_cut = (
            bool(rules.token_budget) and not rules.sampling.stop and self._budget_left < max_tokens
        )
        turn = Turn(
            key=self.key,
            tokens_T=tuple(self.transcript.tokens),
            first_row=self.transcript.first_row,
            seed=self._turn_seed(progress.turns_requested),
            max_tokens=self._budget_left if self._budget_may_cut else max_tokens,
            sampling=rules.sampling,
        )
        progress.turns_requested += 1
        return turn

    def _turn_seed(self, turn: int) -> int:
        # The seed names the group too: at the border of two epochs, or in a refill of dynamic
        # sampling, a prompt may occur twice in one step.
        step, group = self.progress.seed_origin
        name = f"{self.prompt.id}/{group}/{turn}" if turn else f"{self.prompt.id}/{group}"
        return sampling_seed(self._rules.run_seed, step, name, self.sample_index)

    def _room(self) -> int:
        """Tokens that the conversation may still get."""
        assert self.transcript is not None
        return self.progress.max_tokens_total - len(self.transcript.tokens)

    def _end(self, outcome: str) -> Turn | None:
        """End the conversation: there is no next turn."""
        self.outcome = outcome
        self._environments.forget(self.key)
        return None

    def _fail(self, why: str) -> Turn | None:
        if self._environments.settings.on_error == "stop":
            raise EnvironmentFailed(
                f"{self.who}, turn {self.progress.turns}: the environment failed ({why})\n"
                "  --env.on_error drop or zero continues without this sample"
            )
        return self._end("error")
