"""Episodes of workflows: calls of the model become turns of one or several token sequences.

A call whose prompt begins with all of a sequence of its episode continues that sequence: what was
sampled stays as it is, and only the tokens that follow are appended. Any other prompt begins a new
sequence. So a chat template may drop or rewrite earlier turns; what it changes is another prompt.

Everything of an episode happens on the event loop of its workflow. The engine's thread takes calls
from a queue and gives samples back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from r3.config import EnvConfig
from r3.data.template import TemplateFault
from r3.engine import Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.envs.chat import ChatError, Renderer
from r3.envs.workflow import Completion, EpisodeOver, ModelLimit, ModelMessage, OwnTime
from r3.rollout.conversation import (
    CHARACTERS_PER_TOKEN,
    ConversationRules,
    readable_message,
)
from r3.types import Message, Prompt, Rollout

# A call by its place: the number of the call, after those of the forks that lead to it.
_Name = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class TokenSequence:
    """One token sequence of an episode.

    Attributes:
        name: the call that began it.
        transcript: its tokens with log-probabilities and routes.
        max_tokens_total: maximum tokens, those of its first prompt included.
        train: whether it is trained on.
        shown: how a rendered conversation that continues it may begin: its last prompt and the
            message as it was sampled, or without white space at the ends, which templates may trim.
            Empty if it cannot be continued by `chat`.
        busy: a call of it is in flight, or was abandoned in flight.
        calls: the calls that were sampled.
        last_turn: index of the first token of the last message.
        finish_reason: of the last call.
        messages: the conversation, for dumps and reward functions.
    """

    name: _Name
    transcript: Transcript
    max_tokens_total: int
    train: bool
    shown: tuple[str, ...] = ()
    busy: bool = False
    calls: list[_Name] = field(default_factory=list)
    last_turn: int = 0
    finish_reason: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(kw_only=True, slots=True)
class Call:
    """A call in flight."""

    name: _Name
    turn: Turn
    sequence: TokenSequence
    observed: Sequence[int]
    episode: LiveEpisode
    future: asyncio.Future[Sampled]


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """What all episodes of a round share.

    Attributes:
        conversation: limits, sampling and seeds, as conversations have them.
        settings: `env.*`.
        renderer: the policy's chat template.
        tools: JSON schemas of the workflow's class.
        seed_step: step that names the random streams.
        submit: takes a call for the engine.
        next_key: names a call while it is in flight.
    """

    conversation: ConversationRules
    settings: EnvConfig
    renderer: Renderer
    tools: Sequence[Any]
    seed_step: int
    submit: Callable[[Call], None]
    next_key: Callable[[], int]


class LiveEpisode:
    """One attempt at an episode.

    Attributes:
        rules: what the episodes of the round share.
        model: what the workflow calls.
        sequences: in the order in which they began.
        num_turns: calls of the model, those without training included.
        num_continued: trained calls that continued a sequence.
        said: what was read in the model's messages, by their text: tool calls and reasoning.
    """

    def __init__(self, rules: EpisodeRules, prompt: Prompt, group: int, sample_index: int) -> None:
        self.prompt, self.group, self.sample_index = prompt, group, sample_index
        self.sequences: list[TokenSequence] = []
        self.num_turns = self.num_continued = 0
        self.rules = rules
        self.said: dict[str, dict[str, Any]] = {}
        self._own_time: OwnTime | None = None
        self._in_flight: set[asyncio.Future[Sampled]] = set()
        self.model = EpisodeModel(self, ())

    @property
    def who(self) -> str:
        """Name of the episode in messages."""
        version = self.rules.conversation.capture.policy_version
        return f"rollout {self.prompt.id}/{self.sample_index} of step {version}"

    @property
    def calls(self) -> list[_Name]:
        """Trained calls that were sampled, in the order in which the workflow made them."""
        return sorted(call for each in self.sequences if each.train for call in each.calls)

    @property
    def num_calls(self) -> int:
        """Trained calls that were sampled."""
        return len(self.calls)

    def begin(self, own_time: OwnTime) -> None:
        """Accept calls."""
        self._own_time = own_time

    def end(self) -> None:
        """Ignore calls in flight and refuse further ones."""
        self._own_time = None
        for future in self._in_flight:
            future.cancel()

    def rollouts(
        self, outcome: str, metrics: Mapping[str, float], call_rewards: Sequence[float]
    ) -> list[Rollout]:
        """Return the trained sequences.

        Args:
            outcome: how the episode ended, of all its sequences; "stop" leaves each its own.
            metrics: of the episode, for its last sequence.
            call_rewards: one per trained call; empty if the episode has one reward.
        """
        trained = sorted(
            (each for each in self.sequences if each.train), key=lambda each: each.name
        )
        trained = [each for each in trained if each.calls]
        reward_of = dict(zip(self.calls, call_rewards, strict=True)) if call_rewards else {}
        decode = self.rules.conversation.setup.tokenizer.decode
        return [
            replace(
                each.transcript.rollout(
                    self.prompt,
                    group=self.group,
                    sample_index=self.sample_index,
                    finish_reason=each.finish_reason if outcome == "stop" else outcome,
                    response=decode(
                        each.transcript.tokens[each.last_turn :], skip_special_tokens=True
                    ),
                ),
                messages=each.messages,
                sequence=index,
                own_reward=bool(call_rewards),
                turn_rewards=tuple(reward_of[call] for call in each.calls) if reward_of else (),
                metrics=metrics if each is trained[-1] else {},
            )
            for index, each in enumerate(trained)
        ]

    # --- on the event loop ----------------------------------------------------------------------

    def continued(self, text: str, *, train: bool) -> tuple[TokenSequence, list[int]] | None:
        """Return the sequence that a rendered conversation continues, and the tokens that follow.

        The longest one, if there are several, and of those the oldest.
        """
        end = self.rules.renderer.end
        if end is None:
            return None
        found: tuple[TokenSequence, str] | None = None
        for sequence in self.sequences:
            if sequence.busy or sequence.train != train:
                continue
            for shown in sequence.shown:
                longer = found is None or len(shown) > len(found[1])
                if longer and text.startswith(shown + end[0]):
                    found = sequence, shown
        if found is None:
            return None
        sequence, shown = found
        tokens = self.rules.renderer.tokens(text[len(shown) :])
        if not tokens or tokens[0] != end[1]:
            return None
        ended = sequence.transcript.tokens[-1] == end[1]
        return sequence, tokens[1:] if ended else tokens

    def extended(self, tokens: Sequence[int], *, train: bool) -> TokenSequence | None:
        """Return the longest sequence that tokens continue, and of those the oldest."""
        found: TokenSequence | None = None
        for each in self.sequences:
            known = each.transcript.tokens
            longer = found is None or len(known) > len(found.transcript.tokens)
            free = not each.busy and each.train == train
            if longer and free and list(tokens[: len(known)]) == known:
                found = each
        return found

    def begun(self, name: _Name, tokens: Sequence[int], *, train: bool) -> TokenSequence:
        """Begin a sequence.

        Raises:
            ModelLimit: its prompt leaves no room for a token.
        """
        rules = self.rules.conversation
        if len(tokens) >= rules.max_model_len:
            raise ModelLimit(
                "length",
                f"the prompt has {len(tokens)} tokens, and a sequence at most "
                f"{rules.max_model_len} (engine.max_model_len, or what was derived for it)",
            )
        capture = rules.capture if train else replace(rules.capture, captures=False)
        return TokenSequence(
            name=name,
            transcript=Transcript(capture, tokens, who=self.who),
            max_tokens_total=min(len(tokens) + rules.max_response_tokens, rules.max_model_len),
            train=train,
        )

    def check(self) -> None:
        """Check that the episode may make a call.

        Raises:
            ModelLimit: no turns are left.
            EpisodeOver: the episode is over.
        """
        if self._own_time is None:
            raise EpisodeOver("the episode is over: await all calls of the model inside run")
        if self.num_turns >= (limit := self.rules.settings.max_turns):
            raise ModelLimit("turns", f"the episode made {limit} calls of the model: env.max_turns")

    async def sample(
        self,
        name: _Name,
        sequence: TokenSequence,
        observed: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
    ) -> Completion:
        """Sample the next message of a sequence.

        Raises:
            ModelLimit: no tokens are left.
        """
        rules, transcript = self.rules.conversation, sequence.transcript
        tokens = (*transcript.tokens, *observed)
        room = sequence.max_tokens_total - len(tokens)
        if room < 1:
            raise ModelLimit(
                "length",
                f"no token is left: the sequence would have {len(tokens)} of at most "
                f"{sequence.max_tokens_total} tokens before the message "
                "(rollout.max_response_tokens counts observations too)",
            )
        limits = [room, self.rules.settings.max_turn_tokens or room, max_tokens or room]
        step, group = self.rules.seed_step, self.group
        place = "/".join(map(str, name))
        prompt = f"{self.prompt.id}/{group}"
        turn = Turn(
            key=self.rules.next_key(),
            tokens_T=tokens,
            first_row=transcript.first_row if sequence.train else len(tokens) - 1,
            seed=sampling_seed(
                rules.run_seed,
                step,
                prompt if name == (0,) else f"{prompt}/{place}",
                self.sample_index,
            ),
            max_tokens=min(limits),
            sampling=sampling,
        )
        if sequence not in self.sequences:
            self.sequences.append(sequence)
        elif sequence.train:
            self.num_continued += 1
        self.num_turns += 1
        sequence.busy = True
        own_time, future = self._own_time, asyncio.get_running_loop().create_future()
        assert own_time is not None
        own_time.pause()
        self._in_flight.add(future)
        self.rules.submit(
            Call(
                name=name,
                turn=turn,
                sequence=sequence,
                observed=observed,
                episode=self,
                future=future,
            )
        )
        try:
            sampled: Sampled = await future
        finally:
            self._in_flight.discard(future)
            if self._own_time is not None:
                own_time.resume()
        stop = {*sampling.stop_tokens, rules.setup.tokenizer.eos_token_id}
        shown = sampled.tokens_T[:-1] if sampled.tokens_T[-1] in stop else sampled.tokens_T
        return Completion(
            text=rules.setup.tokenizer.decode(shown),
            tokens=tuple(sampled.tokens_T),
            logprobs=tuple(sampled.logprobs_T),
            finish_reason=sampled.finish_reason,
            prompt_tokens=len(tokens),
        )

    def deliver(self, call: Call, sampled: Sampled) -> None:
        """Take the sample of a call; one that nobody awaits any more is ignored.

        Raises:
            FloatingPointError, RouteError: see `Transcript.append_sample`.
        """
        if call.future.done():
            return
        sequence = call.sequence
        sequence.transcript.observe(call.observed)
        sequence.last_turn = len(sequence.transcript.tokens)
        sequence.transcript.append_sample(sampled)
        sequence.calls.append(call.name)
        sequence.finish_reason = sampled.finish_reason
        sequence.busy = False
        call.future.set_result(sampled)


class EpisodeModel:
    """The policy as one branch of an episode calls it; see `r3.envs.workflow.Model`."""

    def __init__(self, episode: LiveEpisode, path: _Name) -> None:
        self._episode, self._path = episode, path
        self._numbers = itertools.count()

    def fork(self) -> EpisodeModel:
        """Return a handle for a branch that runs beside others.

        Its calls are numbered by themselves, so what they sample does not depend on which branch
        is faster.
        """
        return EpisodeModel(self._episode, self._next_name())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._episode.rules.conversation.setup.tokenizer.decode(list(tokens)))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        train: bool = True,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> ModelMessage:
        """Sample the next message of a conversation; see `Model.chat`."""
        episode, rules = self._episode, self._episode.rules
        name = self._next_name()
        episode.check()
        sampling = self._sampling(train, max_tokens, stop, temperature, top_p, top_k)
        plain = [_plain(message, episode.said) for message in messages]
        if tools is None:
            tools = episode.prompt.tools or rules.tools
        limit = rules.conversation.max_model_len
        if (size := _num_characters(plain)) > CHARACTERS_PER_TOKEN * limit:
            raise ModelLimit(
                "length", f"the messages have {size} characters, a sequence at most {limit} tokens"
            )
        parse = rules.conversation.setup.parser(tools)
        try:
            text = rules.renderer.render(plain, tools)
            found = episode.continued(text, train=train)
            if found is None:
                sequence = episode.begun(name, rules.renderer.tokens(text), train=train)
                found = sequence, []
        except (ChatError, TemplateFault) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        sequence, observed = found
        completion = await episode.sample(name, sequence, observed, sampling, max_tokens)
        parsed = parse(completion.text, completion.tokens)
        episode.said[completion.text] = parsed.fields()
        message: Message = {
            "role": "assistant",
            "content": completion.text,
            "finish_reason": completion.finish_reason,
            **parsed.fields(),
        }
        sequence.shown = tuple(
            dict.fromkeys(text + said for said in (completion.text, completion.text.strip()))
        )
        said = {"role": "assistant", "content": completion.text}
        sequence.messages = tuple(readable_message(each) for each in (*messages, said))
        return ModelMessage(message, completion, parsed)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        train: bool = True,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> Completion:
        """Continue a text or tokens; see `Model.complete`."""
        episode, rules = self._episode, self._episode.rules
        name = self._next_name()
        episode.check()
        sampling = self._sampling(train, max_tokens, stop, temperature, top_p, top_k)
        tokenizer = rules.conversation.setup.tokenizer
        limit = rules.conversation.max_model_len
        if isinstance(prompt, str) and len(prompt) > CHARACTERS_PER_TOKEN * limit:
            raise ModelLimit(
                "length", f"the prompt has {len(prompt)} characters, a sequence {limit} tokens"
            )
        tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not tokens or not all(
            type(each) is int and 0 <= each < len(tokenizer) for each in tokens
        ):
            raise ValueError(f"a prompt has at least one token, ids below {len(tokenizer)}")
        sequence = episode.extended(tokens, train=train) or episode.begun(name, tokens, train=train)
        observed = tokens[len(sequence.transcript.tokens) :]
        completion = await episode.sample(name, sequence, observed, sampling, max_tokens)
        sequence.shown = ()
        sequence.messages = (
            {"role": "user", "content": tokenizer.decode(tokens)},
            {"role": "assistant", "content": completion.text},
        )
        return completion

    def _next_name(self) -> _Name:
        return (*self._path, next(self._numbers))

    def _sampling(
        self,
        train: bool,
        max_tokens: int | None,
        stop: Sequence[str],
        temperature: float | None,
        top_p: float | None,
        top_k: int | None,
    ) -> Sampling:
        """The run's sampling with what a call overrides.

        Raises:
            ValueError: a value is not possible, or would train on another distribution.
        """
        run = self._episode.rules.conversation.sampling
        given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        changed = {
            key: value
            for key, value in given.items()
            if value is not None and value != getattr(run, key)
        }
        if train and changed:
            raise ValueError(
                f"{', '.join(changed)}: tokens that are trained on are sampled as rollout.* says, "
                "because the policy's log-probabilities are taken so. Use train=False"
            )
        possible = {
            "temperature": changed.get("temperature", 0) >= 0,
            "top_p": 0 < changed.get("top_p", 1) <= 1,
            "top_k": changed.get("top_k", 0) >= 0,
            "max_tokens": max_tokens is None or max_tokens >= 1,
            "stop": not isinstance(stop, str) and all(stop),
        }
        if wrong := [key for key, is_possible in possible.items() if not is_possible]:
            raise ValueError(f"{', '.join(wrong)}: not a possible value")
        return replace(run, stop=tuple(dict.fromkeys([*run.stop, *stop])), **changed)


def _plain(message: Message, said: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A message as templates take it.

    Args:
        said: what was read in the model's messages, by their text.

    Raises:
        ValueError: it has no role, or a content that is no text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise ValueError(f"{dict(message)!r}: a message needs 'role' and 'content', both strings")
    plain = {**message, "content": content or ""}
    # A message of the model has its calls and its reasoning in the content, as it wrote them:
    # templates that render both would show them twice.
    read = {"tool_calls": [], **said.get(plain["content"], {})} if role == "assistant" else {}
    return {key: value for key, value in plain.items() if key not in read or value != read[key]}


def _num_characters(messages: Sequence[Message]) -> int:
    return sum(len(str(part)) for message in messages for part in message.values())
