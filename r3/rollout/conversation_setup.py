"""What conversations are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from r3 import extras
from r3.config import EnvConfig, model_problem
from r3.data.template import Renderer
from r3.engine import CaptureSpec, Sampling
from r3.errors import Explained
from r3.types import Message, Prompt
from r3.user_code.calls import Step
from r3.user_code.workers import Done

# More characters per token that is left are taken not to fit, without counting their tokens: that
# would take the engine's time. Tokens of text have three or four characters.
CHARACTERS_PER_TOKEN = 32

# Keys of a message that dumps keep.
_READABLE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class EnvironmentFailed(Explained):
    """Users' code failed and `env.on_error` is "stop". The message names the sample."""


class OneTurn:
    """Conversations that are the prompt and one response; reward functions score it.

    Has what `Round` and `Episode` call of environments (`r3.envs.runner`) and workflows.

    Attributes:
        settings: `env.*`.
        tools: JSON schemas for the chat template.
        stop: strings that end a turn.
        one_turn: whether every conversation is the prompt and one response.
        is_workflow: whether users' code calls the model itself.
        has_failed: whether a failure of a conversation was shown.
    """

    tools: Sequence[Any] = ()
    one_turn, is_workflow, has_failed = True, False, False

    def __init__(self, settings: EnvConfig) -> None:
        self.settings, self.stop = settings, tuple(dict.fromkeys(settings.stop))
        self._replies: list[Done] = []

    @property
    def outstanding(self) -> int:
        """Replies that `poll` has not returned."""
        return len(self._replies)

    def open(self, key: int, prompt: Prompt) -> None:
        """Begin a conversation."""
        self._replies.append(Done(key, prompt.messages, None))

    def send(self, key: int, message: Message) -> None:
        """Take the response, which ends the conversation."""
        self._replies.append(Done(key, Step((), None, True), None))

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        """Return the first messages of conversations, or their end."""
        replies, self._replies = self._replies, []
        return replies

    def suspend(self, key: int) -> bytes:
        """Return the state of a conversation that a later step resumes: there is none."""
        return b""

    def resume(self, key: int, state: bytes) -> None:
        """Continue a conversation; R3 before 2026-12 wrote a state, which has nothing either."""

    def discard(self, state: bytes) -> None:
        """Nothing is open."""

    def forget(self, key: int) -> None:
        """Nothing is open."""

    def close_all(self) -> None:
        """Forget replies of a round that failed."""
        self._replies.clear()

    close = close_all


@dataclass(frozen=True, kw_only=True)
class ConversationSetup:
    """What conversations are made of.

    Attributes:
        environments: `OneTurn`, one environment per conversation in flight, or one workflow.
        tokenizer: the policy's.
        renderer: the policy's chat template; it knows what ends a turn.
        chat: renders the messages that follow a message of the model (`r3.envs.chat`). None if
            every conversation is one turn, which needs no such template, and for workflows.
        parser: reads tool calls and reasoning in messages of the model (`r3.envs.tool_calls`);
            None if nobody reads them.
        rounds: the class of its rounds, of rows with several environments; None: `Round`.
    """

    environments: Any
    tokenizer: Any
    renderer: Renderer
    chat: Any = None
    parser: Any = None
    rounds: Any = None

    def split(self, prompts: Sequence[Prompt]) -> list[tuple[ConversationSetup, list[Prompt]]]:
        """Return prompts by what their conversations are made of."""
        return [(self, list(prompts))] if prompts else []

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
        renderer = Renderer(tokenizer, template_kwargs)
        if header := renderer.missing_header():
            rule = (
                f"its chat template does not read add_generation_prompt: a prompt would end before "
                f"{header!r}, which the model would have to write"
            )
            fix = "use a chat template that writes it if add_generation_prompt is set"
            raise model_problem(model_path, rule, fix)
        environments: Any = OneTurn(settings)
        chat = parser = None
        if not settings.is_one_turn:
            environments, chat, parser = extras.runner().conversations(
                settings, renderer, tokenizer, model_path, template_kwargs
            )
        elif settings.tool_parser or settings.reasoning_parser:
            parser = extras.runner().message_reader(settings, tokenizer, template_kwargs)
        return cls(
            environments=environments,
            tokenizer=tokenizer,
            renderer=renderer,
            chat=chat,
            parser=parser,
        )


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


def readable_message(message: Message) -> Message:
    """Return the keys of a message that dumps keep, as plain JSON values.

    An environment may put anything into its messages.
    """
    kept = {name: message[name] for name in _READABLE_KEYS if message.get(name) is not None}
    return dict(json.loads(json.dumps(kept, default=str)))


def num_characters(messages: Sequence[Message]) -> int:
    """Characters of everything in the messages."""
    return sum(len(str(part)) for message in messages for part in message.values())
