"""One sample of a prompt: its token sequences, and the calls of the model that extend them.

An environment answers the model's messages, so its conversation is one sequence that grows at the
end. A workflow calls the model itself and may begin several (`r3.envs.workflow_episode`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from r3.data.rendering import TemplateFault
from r3.engine import Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.metrics.glossary import REFUSED
from r3.rewards.scorer import RewardResult
from r3.rollout.conversation_setup import (
    CHARACTERS_PER_TOKEN,
    ConversationRules,
    num_characters,
    readable_message,
)
from r3.types import Message, Prompt, Rollout, Sample
from r3.user_code.calls import Step
from r3.user_code.workers import Done

# A call by its place: its number in the episode, after those of the forks that lead to it.
CallName = tuple[int, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class TokenSequence:
    """One token sequence of an episode.

    Attributes:
        name: the call that began it.
        transcript: its tokens with log-probabilities and routes.
        max_tokens_total: maximum tokens, those of its first prompt included.
        train: whether it is trained on.
        shown: how a rendered conversation that continues it may begin: its last prompt and the
            message as it was sampled, or without white space at the ends, which templates may trim.
            Empty if it cannot be continued by `Model.chat`.
        busy: a call of it is in flight.
        is_cut: the token budget interrupted its last message.
        calls: the calls whose message is complete.
        rewards: of these calls, None where there is none; empty without rewards per call.
        last_turn: index of the first token of the last message.
        finish_reason: of the last call.
        messages: the conversation, for dumps and reward functions.
    """

    name: CallName
    transcript: Transcript
    max_tokens_total: int
    train: bool = True
    shown: tuple[str, ...] = ()
    busy: bool = False
    is_cut: bool = False
    calls: list[CallName] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    last_turn: int = 0
    finish_reason: str = "stop"
    messages: list[Message] = field(default_factory=list)

    def room(self, observed: Sequence[int] = ()) -> int:
        """Tokens that the sequence may still get after `observed`."""
        return self.max_tokens_total - len(self.transcript.tokens) - len(observed)

    def append(self, call: Call, sampled: Sampled, *, is_cut: bool = False) -> None:
        """Append what a call observed and what was sampled after it.

        Args:
            is_cut: the token budget interrupted the message.

        Raises:
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """
        self.transcript.observe(call.observed)
        if not self.is_cut:
            self.last_turn = len(self.transcript.tokens)
        self.transcript.append_sample(sampled)
        self.is_cut, self.busy = is_cut, False
        if not is_cut:
            self.calls.append(call.name)
            self.finish_reason = sampled.finish_reason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """A call of the model: the next message of a sequence, or the rest of one.

    Attributes:
        observed: tokens that follow the sequence before the message.
        max_tokens: maximum tokens to sample.
        parse: reads the message; None if it is a text.
        future: where a workflow awaits the sample; None for environments.
    """

    episode: Episode
    sequence: TokenSequence
    name: CallName
    observed: Sequence[int]
    max_tokens: int
    sampling: Sampling
    parse: Callable[[str, Sequence[int]], Any] | None = None
    future: asyncio.Future[Said] | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody awaits it any more."""
        return self.future is not None and self.future.done()

    def turn(self, key: int) -> Turn:
        """Return what the engine samples; `key` names it while it is in flight."""
        transcript = self.sequence.transcript
        tokens = (*transcript.tokens, *self.observed)
        return Turn(
            key=key,
            tokens_T=tokens,
            first_row=transcript.first_row if self.sequence.train else len(tokens) - 1,
            seed=self.episode.seed(self.name),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
        )


Said = tuple[Sampled, str, Any]
"""A message of the model: its sample, its text, and what was read in it."""


def message_of(text: str, finish_reason: str, parsed: Any) -> dict[str, Any]:
    """Return a message of the model as environments and workflows get it.

    Args:
        parsed: calls and reasoning that a parser read in it; None without a parser.
    """
    return {
        "role": "assistant",
        "content": text,
        "finish_reason": finish_reason,
        **(parsed.fields() if parsed else {}),
    }


@dataclass(kw_only=True, eq=False)
class Episode(ABC):
    """One sample of a prompt, with an environment or a workflow.

    Attributes:
        rules: what the episodes of the round share.
        submit: takes calls for the engine, from any thread, and errors that end the round.
        key: names the episode in its round.
        seed_origin: step in which it began, and its group in that step. They name its random
            streams, also after the group got another number.
        sequences: in the order in which they began.
        num_turns: messages of the model, those without training included.
        outcome: how it ended: "stop" (by its environment or workflow), "length", "turns" or
            "error"; "suspended" if the token budget interrupted it; empty while it runs.
        failure: why it counts as failed; empty if it does not.
        reward: what its environment or workflow gave for all of it; None if nothing.
        rewards_calls: whether rewards are those of its calls, one by one; None if a workflow did
            not say, because it is unfinished or failed.
        metrics: what its environment or workflow reported, by full names.
        refused: requests of a workflow that got no message, by cause, those of all attempts.
        samples: its trained sequences, once their rewards are known.
        result: what reward functions returned, if they were called.
    """

    kind: ClassVar[str]

    rules: ConversationRules
    submit: Callable[[Call | Exception], None]
    key: int
    prompt: Prompt
    group: int
    sample_index: int
    seed_origin: tuple[int, int]
    sequences: list[TokenSequence] = field(default_factory=list)
    num_turns: int = 0
    outcome: str = ""
    failure: str = ""
    reward: float | None = None
    rewards_calls: bool | None = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    result: RewardResult | None = None

    @abstractmethod
    def open(self) -> None:
        """Begin."""

    @abstractmethod
    def receive(self, report: Done) -> None:
        """Take what its environment or workflow returned; sets `outcome` if it is over."""

    @abstractmethod
    def deliver(self, call: Call, sampled: Sampled) -> None:
        """Take the sample of a call.

        Raises:
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """

    @property
    def who(self) -> str:
        """Name of the episode in messages."""
        version = self.rules.capture.policy_version
        return f"rollout {self.prompt.id}/{self.sample_index} of step {version}"

    @property
    def num_calls(self) -> int:
        """Trained calls that were sampled."""
        return sum(len(sequence.calls) for sequence in self.sequences if sequence.train)

    @property
    def is_suspended(self) -> bool:
        """Whether the token budget interrupted it."""
        return self.outcome == "suspended"

    def seed(self, name: CallName) -> int:
        """Seed of a call's own random stream."""
        # The seed names the group too: at the border of two epochs, or in a refill of dynamic
        # sampling, a prompt may occur twice in one step.
        step, group = self.seed_origin
        place = "/".join(map(str, (self.prompt.id, group, *(name if name != (0,) else ()))))
        return sampling_seed(self.rules.run_seed, step, place, self.sample_index)

    def begun(self, name: CallName, tokens: Sequence[int], *, train: bool = True) -> TokenSequence:
        """Return a new sequence. Without room for a token it cannot be sampled."""
        rules = self.rules
        capture = rules.capture if train else replace(rules.capture, captures=False)
        return TokenSequence(
            name=name,
            transcript=Transcript(capture, tokens, who=self.who),
            max_tokens_total=min(len(tokens) + rules.max_response_tokens, rules.max_model_len),
            train=train,
            last_turn=len(tokens),
        )

    def fail(self, why: str) -> None:
        """End it as failed: what it reported does not count."""
        self.failure, self.outcome = why, "error"
        self.rewards_calls, self.metrics = None, {}

    def rollouts(self) -> list[Rollout]:
        """Return the trained sequences of an episode that is over.

        Evaluation needs one rollout of every episode: without any it is the prompt alone.
        """
        trained = [sequence for sequence in self.sequences if sequence.train and sequence.calls]
        if not trained and self.rules.keep_failed:
            trained = [self.begun((0,), self.prompt.tokens_T)]
        trained.sort(key=lambda sequence: sequence.name)
        made = [self.rollout(sequence, index) for index, sequence in enumerate(trained)]
        refused = {REFUSED[cause]: float(count) for cause, count in self.refused.items()}
        if made and (self.metrics or refused):
            made[-1] = replace(made[-1], metrics={**self.metrics, **refused})
        return made

    def rollout(self, sequence: TokenSequence, index: int = 0) -> Rollout:
        """Return a sequence as the rollout with this index, without metrics."""
        transcript, setup = sequence.transcript, self.rules.setup
        rollout = transcript.rollout(
            self.prompt,
            group=self.group,
            sample_index=self.sample_index,
            finish_reason=sequence.finish_reason if self.outcome == "stop" else self.outcome,
            response=setup.renderer.message_text(transcript.tokens[sequence.last_turn :]),
        )
        if setup.environments.one_turn:  # prompt and response are the whole conversation
            return rollout
        return replace(
            rollout,
            messages=tuple(sequence.messages),
            turn_rewards=tuple(sequence.rewards),
            sequence=index,
            own_reward=self.rewards_calls,
        )


@dataclass(kw_only=True, eq=False)
class EnvironmentEpisode(Episode):
    """The conversation of one environment, driven by its replies and the engine's samples."""

    kind = "environment"

    def __post_init__(self) -> None:
        self._environments = self.rules.setup.environments
        self._turns_requested = 0

    def open(self) -> None:
        """Open the environment."""
        self._environments.open(self.key, self.prompt)

    def receive(self, report: Done) -> None:
        """Take a reply of the environment."""
        try:
            if report.failure is not None:
                self._end("error", f"{report.failure.kind}: {report.failure.text}")
            elif self.sequences:
                self._continue(report.value)
            else:
                self._begin(report.value)
        except TemplateFault as error:
            self._end("error", str(error))

    def deliver(self, call: Call, sampled: Sampled) -> None:
        """Take a sample; send a complete message to the environment."""
        sequence = call.sequence
        sequence.append(call, sampled)
        self.num_turns += 1
        tokens = sequence.transcript.tokens[sequence.last_turn :]
        text = self.rules.setup.renderer.message_text(tokens)
        # Dumps have tool calls as the model wrote them, in the content.
        sequence.messages.append({"role": "assistant", "content": text})
        parsed = call.parse(text, tokens) if call.parse else None
        message = message_of(text, sampled.finish_reason, parsed)
        self._environments.send(self.key, message)

    def _begin(self, messages: tuple[Message, ...]) -> None:
        limit, chat = self.rules.max_model_len, self.rules.setup.chat
        if (size := num_characters(messages)) > CHARACTERS_PER_TOKEN * limit:
            too_long = f"{size} characters, a conversation at most {limit} tokens"
            return self._end("error", f"its first messages have {too_long}")
        # The prompt's own tokens show the tools of its row, or else those of the environment.
        tokens: Sequence[int] = self.prompt.tokens_T
        if chat and messages != self.prompt.messages:
            tokens = chat.first(messages, self.prompt.tools)
        sequence = self.begun((0,), tokens)
        sequence.messages = [readable_message(message) for message in messages]
        self.sequences = [sequence]
        if sequence.room() < 1:
            too_long = f"{len(tokens)} tokens, a conversation at most {limit}"
            return self._end("error", f"its first messages have {too_long}")
        self._next_turn(sequence, ())

    def _continue(self, step: Step) -> None:
        (sequence,) = self.sequences
        sequence.rewards.append(step.reward)
        self.metrics = {**self.metrics, **step.metrics}
        if step.done:
            return self._end("stop")
        if sequence.room() < 1:
            return self._end("length")
        if self.num_turns == self._environments.settings.max_turns:
            return self._end("turns")
        chat = self.rules.setup.chat
        assert chat is not None
        if num_characters(step.messages) > CHARACTERS_PER_TOKEN * sequence.room():
            return self._end("length")
        last = sequence.transcript.tokens[-1]
        observed = chat.following(step.messages, last, self.prompt.tools)
        # An observation that leaves no room for a response is left out: it has no routes, and
        # nothing would be trained on it.
        if sequence.room(observed) < 1:
            return self._end("length")
        sequence.messages += [readable_message(message) for message in step.messages]
        self._next_turn(sequence, observed)

    def _max_tokens(self, sequence: TokenSequence, observed: Sequence[int]) -> int:
        """Maximum tokens of the next turn."""
        limit = self._environments.settings.max_turn_tokens
        return min(sequence.room(observed), limit or sequence.max_tokens_total)

    def _next_turn(self, sequence: TokenSequence, observed: Sequence[int]) -> None:
        rules, parser, parse = self.rules, self.rules.setup.parser, None
        try:
            if parser:
                parse = parser(self.prompt.tools or self._environments.tools)
        except ValueError as error:
            return self._end("error", f"its tools cannot be used by env.tool_parser: {error}")
        self.submit(
            Call(
                episode=self,
                sequence=sequence,
                name=(self._turns_requested,),
                observed=observed,
                max_tokens=self._max_tokens(sequence, observed),
                sampling=rules.sampling,
                parse=parse,
            )
        )
        self._turns_requested += 1

    def _end(self, outcome: str, failure: str = "") -> None:
        """End the conversation: there is no next turn."""
        known = [reward for each in self.sequences for reward in each.rewards if reward is not None]
        self.reward = sum(known) if known else None
        self.outcome = outcome
        if failure:
            self.fail(failure)
        self._environments.forget(self.key)
