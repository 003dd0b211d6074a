"""What conversations are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from r3 import extras
from r3.config import EnvConfig, model_problem
from r3.data.template import Renderer
from r3.engine import CaptureSpec, Sampling
from r3.envs.chat import Chat
from r3.envs.find import find, is_workflow
from r3.envs.runner import Environments
from r3.envs.tool_calls import MessageReader, built_in
from r3.types import Message

# More characters per token that is left are taken not to fit, without counting their tokens: that
# would take the engine's time. Tokens of text have three or four characters.
CHARACTERS_PER_TOKEN = 32

# Keys of a message that dumps keep.
_READABLE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class EnvironmentFailed(RuntimeError):
    """Users' code failed and `env.on_error` is "stop". The message names the sample."""


@dataclass(frozen=True, kw_only=True)
class ConversationSetup:
    """What conversations are made of.

    Attributes:
        environments: one environment per conversation in flight, or one workflow.
        tokenizer: the policy's.
        renderer: the policy's chat template; it knows what ends a turn.
        chat: renders the messages that follow a message of the model. None if every conversation
            is one turn, which needs no such template, and for workflows.
        parser: reads tool calls and reasoning in messages of the model.
    """

    environments: Any
    tokenizer: Any
    renderer: Renderer
    chat: Chat | None = None
    parser: MessageReader = field(default_factory=lambda: MessageReader(built_in))

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
        renderer = Renderer(tokenizer, template_kwargs)
        if header := renderer.missing_header():
            rule = (
                f"its chat template does not read add_generation_prompt: a prompt would end before "
                f"{header!r}, which the model would have to write"
            )
            fix = "use a chat template that writes it if add_generation_prompt is set"
            raise model_problem(model_path, rule, fix)
        parser = MessageReader(built_in)
        if settings.tool_parser or settings.reasoning_parser:
            parser = extras.message_parser(settings, tokenizer, template_kwargs)
        environments: Any
        chat = None
        if is_workflow(found):
            environments = extras.workflows(settings, found)
        else:
            environments = Environments(settings)
            if not environments.one_turn:
                keep = settings.keep_reasoning
                chat = Chat(renderer, model_path, environments.tools, keep_reasoning=keep)
        return cls(
            environments=environments,
            tokenizer=tokenizer,
            renderer=renderer,
            chat=chat,
            parser=parser,
        )

    @property
    def environment_calls(self) -> Environments:
        """The environments, where there is no workflow."""
        assert isinstance(self.environments, Environments), "a workflow has no environments"
        return self.environments


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
