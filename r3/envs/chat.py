"""Messages to tokens without ever re-tokenising what was sampled: what a template puts *behind* the model's message is appended.

A template renders whole conversations. Rendering one again after the model spoke, and tokenising that, need not give the
tokens that were sampled, nor even the same text. So only the text after the model's message is taken from the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from r3.config import ConfigError, Problem
from r3.types import Message

_SPOKEN = "R3whatthemodelsaid"  # stands for the model's message; no template changes it


class ChatError(ValueError):
    """Messages that the chat template does not take."""


class Chat:
    """A model's chat template, for conversations that grow at the end.

    Attributes:
        end: id of the token that ends the model's turn.
    """

    def __init__(self, tokenizer: Any, model_path: str, tools: Sequence[Any] = ()) -> None:
        """Check that the template can be appended to.

        Raises:
            ConfigError: naming the model, when what comes after a message depends on what came before it, when the model's
                message is not where its turn was opened, or when no single token ends a turn.
        """
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._suffixes: dict[str, tuple[int, ...]] = {}
        question = [{"role": "user", "content": "a"}]
        longer = [
            *question,
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c d"},
        ]
        said = {"role": "assistant", "content": _SPOKEN}

        def refuse(rule: str) -> ConfigError:
            fix = "use a template that appends turns (env.name single_turn works with any), or another model"
            return ConfigError(
                [Problem("model.path", model_path, f"its chat template {rule}", fix)]
            )

        ends = set()
        for role in ("user", "tool") if tools else ("user",):
            new = [{"role": role, "content": "e"}]
            try:
                after = [self._after(old, new) for old in (question, longer)]
                opened = self._render(question, True) + _SPOKEN
                whole = self._render([*question, said, *new], True)
            except (ChatError, TemplateError) as error:
                raise refuse(
                    f"does not take a message of role {role} after the model's ({error})"
                ) from error
            if after[0] != after[1]:
                raise refuse(
                    f"renders a message of role {role} differently after a longer conversation"
                )
            if not whole.startswith(opened):
                raise refuse("moves or changes the model's message once another one follows")
            ends.add(self._tokens(after[0])[0])
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if len(ends) != 1 or not ends <= special:
            raise refuse(
                f"does not end the model's turn with one special token (but {sorted(ends)})"
            )
        (self.end,) = ends

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the messages that a conversation begins with, ready for the model to speak."""
        try:
            return self._tokens(self._render(messages, True))
        except TemplateError as error:
            raise ChatError(f"the chat template does not take these messages: {error}") from error

    def following(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Tokens to append after the model's: the end of its turn unless it was sampled (`ended`), messages, its next turn."""
        key = repr(messages)
        if key not in self._suffixes:
            try:
                text = self._after([{"role": "user", "content": "a"}], messages)
            except TemplateError as error:
                raise ChatError(f"the chat template does not take {messages!r}: {error}") from error
            if (
                len(self._suffixes) > 4096
            ):  # games say the same few things over and over; searches never do
                self._suffixes.clear()
            self._suffixes[key] = tuple(self._tokens(text))
        tokens = list(self._suffixes[key])
        if tokens[0] != self.end:
            raise ChatError(f"the chat template does not end the model's turn before {messages!r}")
        return tokens[1:] if ended else tokens

    def _after(self, old: Sequence[Message], new: Sequence[Message]) -> str:
        text = self._render([*old, {"role": "assistant", "content": _SPOKEN}, *new], True)
        _, spoken, after = text.partition(_SPOKEN)
        if not spoken or _SPOKEN in after or not after:
            raise ChatError("the model's message does not appear exactly once, as it is")
        return after

    def _render(self, messages: Sequence[Message], opening: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=self._tools, add_generation_prompt=opening, tokenize=False
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
