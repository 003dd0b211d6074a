"""Environments as episodes: the environment answers each message of the model.

A conversation is one token sequence that grows at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from r3.data.rendering import TemplateFault
from r3.engine import Sampled
from r3.envs.calls import Step
from r3.rollout.conversation import CHARACTERS_PER_TOKEN, num_characters, readable_message
from r3.rollout.episode import Call, Episode, TokenSequence, message_of
from r3.types import Message
from r3.user_code.workers import Done


@dataclass(kw_only=True, eq=False)
class EnvironmentEpisode(Episode):
    """The conversation of one environment, driven by its replies and the engine's samples."""

    kind = "environment"

    def __post_init__(self) -> None:
        self._environments = self.rules.setup.environment_calls
        self._turns_requested = 0

    def open(self) -> None:
        """Open the environment."""
        self._environments.open(self.key, self.prompt)

    def receive(self, report: Done) -> None:
        """Take a reply of the environment."""
        try:
            if report.failure is not None:
                self._end("error", f"{report.failure.kind}: {report.failure.text}")
            elif isinstance(report.value, Step):
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
        assert call.parse is not None, "environments get messages"
        message = message_of(text, sampled.finish_reason, call.parse(text, tokens))
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
        rules = self.rules
        try:
            parse = rules.setup.parser(self.prompt.tools or self._environments.tools)
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
        given = [reward for each in self.sequences for reward in each.rewards if reward is not None]
        self.reward = sum(given) if given else None
        self.outcome = outcome
        if failure:
            self.fail(failure)
        self._environments.forget(self.key)
