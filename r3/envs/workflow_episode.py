"""Workflows as episodes: calls of the model become turns of one or several token sequences.

A call whose prompt begins with all of a sequence of its episode continues that sequence: what was
sampled stays as it is, and only the tokens that follow are appended. Any other prompt begins a new
sequence. So a chat template may drop or rewrite earlier turns; what it changes is another prompt.

Everything of an episode happens on the event loop of its workflow. The engine's thread takes calls
from a queue and gives samples back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from r3.data.conversation import half_character
from r3.data.rendering import TemplateFault
from r3.engine import Sampled, Sampling, Transcript
from r3.envs.apis.tokens import token_bytes
from r3.envs.options import plain_message, sampling_faults
from r3.envs.tool_calls import Parse, Parsed
from r3.envs.workflow import CallOptions, Completion, EpisodeOver, ModelLimit, ModelMessage
from r3.envs.workflows import OwnTime, Workflows
from r3.rollout.conversation_setup import CHARACTERS_PER_TOKEN, num_characters, readable_message
from r3.rollout.episode import Call, CallName, Episode, Said, TokenSequence, message_of
from r3.types import Message, RouteError
from r3.user_code.workers import Done


@dataclass(kw_only=True, eq=False)
class WorkflowEpisode(Episode):
    """One episode of a workflow; a retry starts it again.

    Attributes:
        said: what was read in the model's messages, by their text: tool calls and reasoning.
    """

    kind = "workflow"

    def __post_init__(self) -> None:
        workflows, renderer = self.rules.setup.environments, self.rules.setup.renderer
        assert isinstance(workflows, Workflows)
        self.workflows, self.renderer = workflows, renderer
        self.said: dict[str, dict[str, Any]] = {}
        self._own_time: OwnTime | None = None
        self._in_flight: set[asyncio.Future[Said]] = set()

    def open(self) -> None:
        """Start the workflow."""
        self.workflows.open(self.key, self.prompt, self)

    def begin(self, own_time: OwnTime) -> EpisodeModel:
        """Begin an attempt; return what the workflow calls."""
        self._own_time, self.sequences, self.num_turns, self.said = own_time, [], 0, {}
        return EpisodeModel(self, own_time, ())

    def end(self) -> None:
        """Ignore calls in flight, which are no turns, and refuse further ones."""
        self._own_time = None
        for future in self._in_flight:
            future.cancel()
        self.num_turns -= sum(future.cancelled() for future in self._in_flight)

    def receive(self, report: Done) -> None:
        """Take the result of the workflow, or why there is none."""
        if (failure := report.failure) is not None:
            return self.fail(f"{failure.kind}: {failure.text}")
        result, limit = report.value
        if not self.num_calls and not self.rules.keep_failed:
            aborted = f"requests aborted: {count}" if (count := self.refused["aborted"]) else ""
            why = f" ({limit or aborted})" if limit or aborted else ""
            return self.fail(
                f"it made no call of the model with train=True: nothing to train on{why}"
            )
        self.outcome = limit.limit if limit else "stop"
        if result is None:
            self.rewards_calls = None
        else:
            self.reward, self.metrics = result.reward, result.metrics
            self.rewards_calls = bool(result.call_rewards)
        if result and result.call_rewards:
            trained = [sequence for sequence in self.sequences if sequence.train]
            calls = sorted(call for sequence in trained for call in sequence.calls)
            reward_of = dict(zip(calls, result.call_rewards, strict=True))
            for sequence in trained:
                sequence.rewards = [reward_of[call] for call in sequence.calls]

    def deliver(self, call: Call, sampled: Sampled) -> None:
        """Read a sample, and pass it to the event loop."""
        if call.is_abandoned:
            return
        # Here and not on the event loop: only the main thread can interrupt a regular expression.
        text, tokens = self.renderer.message_text(sampled.tokens_T), sampled.tokens_T
        parsed = call.parse(text, tokens) if call.parse else Parsed(content=text, calls=[])
        self.workflows.call_soon(self._take, call, (sampled, text, parsed))

    # --- on the event loop ----------------------------------------------------------------------

    def continued(self, text: str, *, train: bool) -> tuple[TokenSequence, list[int]] | None:
        """Return the sequence that a rendered conversation continues, and the tokens that follow.

        The longest one, if there are several, and of those the oldest.
        """
        followers = self.renderer.followers
        longest: tuple[TokenSequence, str] | None = None
        for sequence in self.sequences:
            if sequence.busy or sequence.train != train:
                continue
            for shown in sequence.shown:
                longer = longest is None or len(shown) > len(longest[1])
                if longer and text.startswith(tuple(shown + follower for follower in followers)):
                    longest = sequence, shown
        if longest is None:
            return None
        sequence, shown = longest
        tokens = self.renderer.tokens(text[len(shown) :])
        return sequence, self.renderer.following(tokens, sequence.transcript.tokens[-1])

    def extended(self, tokens: Sequence[int], *, train: bool) -> TokenSequence | None:
        """Return the longest sequence that tokens continue, and of those the oldest."""
        longest: TokenSequence | None = None
        for sequence in self.sequences:
            known = sequence.transcript.tokens
            longer = longest is None or len(known) > len(longest.transcript.tokens)
            free = not sequence.busy and sequence.train == train
            if longer and free and list(tokens[: len(known)]) == known:
                longest = sequence
        return longest

    def new_sequence(self, name: CallName, tokens: Sequence[int], *, train: bool) -> TokenSequence:
        """Begin a sequence.

        Raises:
            ModelLimit: its prompt leaves no room for a token.
        """
        if len(tokens) >= (limit := self.rules.max_model_len):
            raise ModelLimit(
                "length",
                f"the prompt has {len(tokens)} tokens, and a sequence at most {limit} "
                "(engine.max_model_len, or what was derived for it)",
            )
        return self.begun(name, tokens, train=train)

    def check(self, own_time: OwnTime) -> None:
        """Check that an attempt may make a call.

        Raises:
            ModelLimit: no turns are left.
            EpisodeOver: the attempt is over.
        """
        if self._own_time is not own_time:
            raise EpisodeOver("the episode is over: await all calls of the model inside run")
        if self.num_turns >= (limit := self.workflows.settings.max_turns):
            raise ModelLimit("turns", f"the episode made {limit} calls of the model: env.max_turns")

    async def sample(
        self,
        name: CallName,
        sequence: TokenSequence,
        observed: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
        parse: Parse | None = None,
    ) -> tuple[Completion, Parsed]:
        """Sample the next message of a sequence, and read it.

        Args:
            parse: reads the message; None for a text.

        Raises:
            ModelLimit: no tokens are left.
        """
        prompt = (*sequence.transcript.tokens, *observed)
        if (room := sequence.room(observed)) < 1:
            raise ModelLimit(
                "length",
                f"no token is left: the sequence would have {len(prompt)} of at most "
                f"{sequence.max_tokens_total} tokens before the message "
                "(rollout.max_response_tokens counts observations too)",
            )
        own_time, future = self._own_time, asyncio.get_running_loop().create_future()
        assert own_time is not None
        if sequence not in self.sequences:
            self.sequences.append(sequence)
        self.num_turns += 1
        sequence.busy = True
        own_time.pause()
        self._in_flight.add(future)
        self.submit(
            Call(
                episode=self,
                sequence=sequence,
                name=name,
                observed=observed,
                max_tokens=min(
                    room, self.workflows.settings.max_turn_tokens or room, max_tokens or room
                ),
                sampling=sampling,
                parse=parse,
                future=future,
            )
        )
        self.workflows.wake.put(None)
        try:
            sampled, text, parsed = await future
        except asyncio.CancelledError:
            if self._own_time is own_time:  # nobody got it, so it does not count
                self.num_turns -= 1
                # As it was: what the engine still samples is in no sequence. Unless it came just
                # now: then the sequence holds a message that nobody got.
                sequence.busy, sequence.finish_reason = False, "aborted"
                if not sequence.calls:
                    self.sequences.remove(sequence)
                elif not future.cancelled():
                    sequence.shown = ()
            raise
        finally:
            self._in_flight.discard(future)
            if self._own_time is own_time:
                own_time.resume()
        completion = Completion(
            text=text,
            tokens=tuple(sampled.tokens_T),
            logprobs=tuple(sampled.logprobs_T),
            finish_reason=sampled.finish_reason,
            prompt=prompt,
            routes=partial(_routes, sequence.transcript, len(prompt) + len(sampled.tokens_T) - 1),
            kept=sampled.kept,
        )
        return completion, parsed

    def _take(self, call: Call, said: Said) -> None:
        if call.future is None or call.is_abandoned:
            return
        try:
            call.sequence.append(call, said[0])
        except (RouteError, FloatingPointError, AssertionError) as error:
            # Not the workflow's fault: the engine's thread raises it and ends the run.
            self.submit(error)
            self.workflows.wake.put(None)
        else:
            call.future.set_result(said)


def _routes(transcript: Transcript, end: int, start: int) -> np.ndarray | None:
    rows = transcript.rows()
    return rows[start:end] if rows.shape[1] else None


class EpisodeModel:
    """The policy as one branch of an episode calls it; see `r3.envs.workflow.Model`."""

    def __init__(self, episode: WorkflowEpisode, own_time: OwnTime, path: CallName) -> None:
        self._episode, self._own_time, self._path = episode, own_time, path
        self._numbers = itertools.count()

    def fork(self) -> EpisodeModel:
        """Return a handle for a branch that runs concurrently.

        Its calls are numbered by themselves, so what they sample does not depend on which branch
        is faster.
        """
        return EpisodeModel(self._episode, self._own_time, self._next_name())

    @property
    def max_tokens_total(self) -> int:
        """Maximum tokens of a prompt and its response."""
        return self._episode.rules.max_model_len

    @property
    def address(self) -> tuple[str, str]:
        """Where `serve` listens, and the host that agents are told; see `Model.address`."""
        settings = self._episode.workflows.settings
        return settings.listen, settings.advertise

    @property
    def refused(self) -> Counter[str]:
        """Calls of the episode that were refused, by cause; see `Model.refused`."""
        return self._episode.refused

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._episode.rules.setup.tokenizer.decode(list(tokens)))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; see `Model.token_bytes`."""
        return token_bytes(self._episode.rules.setup.tokenizer, token)

    def num_tokens(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return how many tokens a conversation has; see `Model.num_tokens`."""
        with self._counted():
            return len(self._episode.renderer.tokens(self._rendered(messages, tools)[0]))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CallOptions],
    ) -> ModelMessage:
        """Sample the next message of a conversation; see `Model.chat`."""
        with self._counted():
            return await self._chat(messages, tools, options)

    async def complete(
        self, prompt: str | Sequence[int], **options: Unpack[CallOptions]
    ) -> Completion:
        """Continue a text or tokens; see `Model.complete`."""
        with self._counted():
            return await self._complete(prompt, options)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call that is refused."""
        try:
            yield
        except ModelLimit as limit:
            self.refused[limit.limit] += 1
            raise
        except (TypeError, ValueError):
            self.refused["invalid"] += 1
            raise

    async def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: CallOptions,
    ) -> ModelMessage:
        episode, rules = self._episode, self._episode.rules
        name, sampling, train, max_tokens = self._begun(options)
        text, tools = self._rendered(messages, tools)
        parse = rules.setup.parser(tools)
        continued = episode.continued(text, train=train)
        if continued is None:
            sequence = episode.new_sequence(name, episode.renderer.tokens(text), train=train)
            continued = sequence, []
        sequence, observed = continued
        completion, parsed = await episode.sample(
            name, sequence, observed, sampling, max_tokens, parse
        )
        episode.said[completion.text] = parsed.fields()
        sequence.shown = tuple(
            text + episode.renderer.marked_reply(said)
            for said in dict.fromkeys((completion.text, completion.text.strip()))
        )
        said = {"role": "assistant", "content": completion.text}
        sequence.messages = [readable_message(entry) for entry in (*messages, said)]
        message = message_of(completion.text, completion.finish_reason, parsed)
        return ModelMessage(message, completion, parsed)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return a conversation as the template writes it, and its tools.

        Raises:
            ModelLimit: it is longer than any sequence.
            ValueError: it is no conversation, or the template refuses it.
        """
        episode, limit = self._episode, self._episode.rules.max_model_len
        if isinstance(messages, str) or not all(isinstance(each, Mapping) for each in messages):
            raise ValueError(f"messages must be a list of messages, and is {str(messages)[:200]!r}")
        plain = [plain_message(message, episode.said) for message in messages]
        if tools is None:
            tools = episode.prompt.tools or episode.workflows.tools
        if (size := num_characters(plain)) > CHARACTERS_PER_TOKEN * limit:
            raise ModelLimit(
                "length", f"the messages have {size} characters, a sequence at most {limit} tokens"
            )
        try:
            return episode.renderer.render(plain, tools), tools
        except TemplateFault as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    async def _complete(self, prompt: str | Sequence[int], options: CallOptions) -> Completion:
        episode, rules = self._episode, self._episode.rules
        name, sampling, train, max_tokens = self._begun(options)
        tokenizer = rules.setup.tokenizer
        limit = rules.max_model_len
        if isinstance(prompt, str) and len(prompt) > CHARACTERS_PER_TOKEN * limit:
            raise ModelLimit(
                "length", f"the prompt has {len(prompt)} characters, a sequence {limit} tokens"
            )
        if isinstance(prompt, str) and half_character(prompt):
            raise ValueError("the prompt holds half of a character")
        if isinstance(prompt, str):
            # A rendered conversation begins with the token that the tokenizer would add.
            adds = not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token))
            tokens = tokenizer(prompt, add_special_tokens=adds)["input_ids"]
        else:
            tokens = list(prompt)
        if not tokens or not all(map(self._is_token, tokens)):
            raise ValueError(f"a prompt has at least one token, ids below {self._vocabulary}")
        sequence = episode.extended(tokens, train=train) or episode.new_sequence(
            name, tokens, train=train
        )
        observed = tokens[len(sequence.transcript.tokens) :]
        completion, _ = await episode.sample(name, sequence, observed, sampling, max_tokens)
        sequence.shown = ()
        sequence.messages = [
            {"role": "user", "content": tokenizer.decode(tokens)},
            {"role": "assistant", "content": completion.text},
        ]
        return completion

    @property
    def _vocabulary(self) -> int:
        return len(self._episode.rules.setup.tokenizer)

    def _is_token(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self._vocabulary

    def _next_name(self) -> CallName:
        return (*self._path, next(self._numbers))

    def _begun(self, options: CallOptions) -> tuple[CallName, Sampling, bool, int | None]:
        """Return name, sampling, `train` and `max_tokens` of a call."""
        name = self._next_name()
        self._episode.check(self._own_time)
        sampling = self._sampling(options)
        return name, sampling, options.get("train", True), options.get("max_tokens")

    def _sampling(self, options: CallOptions) -> Sampling:
        """The run's sampling with what a call overrides.

        Raises:
            TypeError: there is no such keyword.
            ValueError: a value is not possible, or would train on another distribution.
        """
        run, stop = self._episode.rules.sampling, options.get("stop", ())
        ends = options.get("stop_tokens", ())
        if unknown := options.keys() - CallOptions.__annotations__.keys():
            raise TypeError(f"a call of the model has no keyword {min(unknown)}")
        asked: dict[str, Any] = {key: options.get(key) for key in ("temperature", "top_p", "top_k")}
        changed = {
            key: value
            for key, value in asked.items()
            if value is not None and value != getattr(run, key)
        }
        if type(train := options.get("train", True)) is not bool:
            raise ValueError(f"train must be True or False, and is {train!r}")
        if train and changed:
            raise ValueError(
                f"{', '.join(changed)}: tokens that are trained on are sampled as rollout.* says, "
                "because the policy's log-probabilities are taken so. Use train=False"
            )
        if isinstance(stop, str):
            raise ValueError("stop must be a list of texts, and is one text")
        sampling = replace(
            run,
            stop=tuple(dict.fromkeys([*run.stop, *stop])),
            stop_tokens=tuple(dict.fromkeys([*run.stop_tokens, *ends])),
            **changed,
        )
        faults = sampling_faults(sampling)
        if not all(map(self._is_token, ends)):
            faults.append(f"stop_tokens must be token ids below {self._vocabulary}")
        max_tokens = options.get("max_tokens")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            faults.append("max_tokens must be an integer of at least 1")
        if faults:
            raise ValueError("; ".join(faults))
        return sampling
