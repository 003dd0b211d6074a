"""Convert messages to tokens without re-tokenising sampled text.

A chat template renders whole conversations. Rendering one again after a message of the model need
not give the tokens that were sampled, nor even the same text. So R3 takes from the template only
the text that follows the model's message, and appends its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3.config import ConfigError, model_problem
from r3.data.rendering import TemplateFault
from r3.data.template import PLACEHOLDER, Renderer
from r3.types import Message


class Chat:
    """A model's chat template, for conversations that grow at the end."""

    def __init__(
        self,
        renderer: Renderer,
        model_path: str,
        tools: Sequence[Any] = (),
        *,
        keep_reasoning: bool = False,
    ) -> None:
        """Check that conversations can be extended at the end.

        Args:
            model_path: names the model in errors.
            tools: JSON schemas that the template shows to conversations without tools of their own.
            keep_reasoning: whether a template may remove reasoning from earlier messages, where
                conversations keep it.

        Raises:
            ConfigError: what follows a message depends on what came before it, a message changes
                or moves once another one follows, or no special token ends a turn.
        """
        self._renderer, self._tools = renderer, list(tools)
        self._suffixes: dict[str, tuple[int, ...]] = {}
        question = [{"role": "user", "content": "a"}]
        longer = [
            *question,
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c d"},
        ]
        sampled = {"role": "assistant", "content": PLACEHOLDER}

        thought = {"role": "assistant", "content": f"<think>\n{PLACEHOLDER}\n</think>\n\nb"}

        def refuse(rule: str, other: str = "--env.name single_turn") -> ConfigError:
            fix = f"use a chat template that only appends turns, another model, or {other}"
            return model_problem(model_path, f"its chat template {rule}", fix)

        for role in ("user", "tool") if tools else ("user",):
            new = [{"role": role, "content": "e"}]
            try:
                after = [renderer.after(old, new, tools) for old in (question, longer)]
                opened = renderer.render(question, tools) + PLACEHOLDER
                whole = renderer.render([*question, sampled, *new], tools)
                replied = [*longer[:2], *new]
                grown = renderer.render(replied, tools) + PLACEHOLDER
                again = renderer.render([*replied, sampled, longer[2]], tools)
                reasoned = renderer.render([*question, thought, *new], tools)
            except TemplateFault as error:
                raise refuse(
                    f"refuses a message of role {role} after the model's ({error})"
                ) from error
            if after[0] != after[1]:
                raise refuse(
                    f"renders a message of role {role} differently after a longer conversation"
                )
            if not whole.startswith(opened):
                raise refuse("moves or changes the model's message once another one follows")
            if not again.startswith(grown):
                raise refuse(
                    f"renders a message of role {role} differently once the conversation goes on",
                    "a workflow (docs/workflows.md), which renders the conversation at each call",
                )
            if PLACEHOLDER not in reasoned and not keep_reasoning:
                raise refuse(
                    "removes reasoning (<think>) from the model's message once another one follows",
                    "--env.keep_reasoning true, which keeps it in the conversation",
                )
            if not after[0].startswith(renderer.followers):
                raise refuse(
                    "does not end the model's turn with a special token, neither its own nor "
                    f"that of the next message (but with {after[0][:20]!r})"
                )

    def first(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the tokens of the first messages, up to where the model's message begins.

        Args:
            tools: the conversation's own.

        Raises:
            TemplateFault: the template refuses the messages.
        """
        try:
            return self._renderer.tokens(self._renderer.render(messages, tools or self._tools))
        except TemplateFault as error:
            raise TemplateFault(f"the chat template refuses these messages: {error}") from error

    def following(
        self, messages: Sequence[Message], last: int, tools: Sequence[Any] = ()
    ) -> list[int]:
        """Return the tokens that follow a message of the model, up to where the next one begins.

        Args:
            messages: the environment's.
            last: the last token of the model's message. If no token ended the turn, the one that
                the template writes is included.
            tools: the conversation's own.

        Raises:
            TemplateFault: the template refuses the messages.
        """
        key = repr((messages, tools))
        if key not in self._suffixes:
            try:
                text = self._renderer.after(
                    [{"role": "user", "content": "a"}], messages, tools or self._tools
                )
                tokens = self._renderer.tokens(text)
            except TemplateFault as error:
                raise TemplateFault(f"the chat template refuses {messages!r}: {error}") from error
            if not text.startswith(self._renderer.followers):
                raise TemplateFault(
                    f"the chat template does not end the model's turn before {messages!r}"
                )
            # Games repeat few messages, so caching pays; searches never do, so it is bounded.
            if len(self._suffixes) > 4096:
                self._suffixes.clear()
            self._suffixes[key] = tuple(tokens)
        return self._renderer.following(self._suffixes[key], last)
