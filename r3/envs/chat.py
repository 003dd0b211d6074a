"""Messages to tokens, without ever re-tokenising what was sampled.

A chat template renders whole conversations. Rendering one again after a message of the model need
not give the tokens that were sampled, nor even the same text. So R3 takes from the template only
the text that follows the model's message, and appends its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from r3.config import ConfigError, Problem
from r3.data.template import TemplateFault, apply_template
from r3.envs.tool_calls import half_character
from r3.types import Message

# Stands for the model's message. No template changes letters and digits.
_PLACEHOLDER = "R3messageofthemodel"
_REPLACEMENT = "\ufffd"  # stands for bytes that are no character

# Letters in the vocabularies of byte-level BPE, which have no control characters.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}


class ChatError(ValueError):
    """The chat template refuses these messages."""


class Renderer:
    """A model's chat template and its tokenizer.

    Attributes:
        end: text and id of the special token that ends the model's turn; None if the template has
            none.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        """Find what ends a turn.

        Args:
            template_kwargs: further variables of the template.
        """
        self._tokenizer = tokenizer
        self._variables = dict(template_kwargs)
        self.special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.end = self._end()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Return a conversation as text, up to where the model's message begins.

        Raises:
            TemplateFault: the template refuses the messages.
        """
        text: str = apply_template(
            self._tokenizer,
            messages,
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            **self._variables,
        )
        return text

    def tokens(self, text: str) -> list[int]:
        """Tokenise rendered text.

        Raises:
            ChatError: it holds half a character.
        """
        if half := half_character(text):
            raise ChatError(f"a message holds {half!r}, half of a character")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character."""
        text: str = self._tokenizer.decode([token])
        if _REPLACEMENT not in text:
            return text.encode()
        piece: str = self._tokenizer.convert_ids_to_tokens(token)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # of SentencePiece
            return bytes.fromhex(byte[1])
        try:
            return bytes(_BYTES[letter] for letter in piece)
        except KeyError:
            return text.encode()

    def after(
        self, old: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = ()
    ) -> str:
        """Return the text that follows a message of the model which comes after `old`.

        Raises:
            ChatError: the message does not appear in the text as it is.
            TemplateFault: the template refuses the messages.
        """
        text = self.render([*old, {"role": "assistant", "content": _PLACEHOLDER}, *new], tools)
        _, found, after = text.partition(_PLACEHOLDER)
        if not found or _PLACEHOLDER in after or not after:
            raise ChatError("the model's message does not appear unchanged and exactly once")
        return after

    def _end(self) -> tuple[str, int] | None:
        question = [{"role": "user", "content": "a"}]
        try:
            token = self.tokens(self.after(question, question))[0]
        except (ChatError, TemplateFault):
            return None
        return (self._tokenizer.decode([token]), token) if token in self.special else None


class Chat:
    """A model's chat template, for conversations that grow at the end.

    Attributes:
        end: id of the token that ends the model's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_path: str,
        tools: Sequence[Any] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check that conversations can be extended at the end.

        Args:
            model_path: names the model in errors.
            tools: JSON schemas that the template shows.
            template_kwargs: further variables of the template.

        Raises:
            ConfigError: what follows a message depends on what came before it, the model's message
                moves once another one follows, or no single special token ends a turn.
        """
        self._renderer = Renderer(tokenizer, template_kwargs)
        self._tools = list(tools)
        self._suffixes: dict[str, tuple[int, ...]] = {}
        question = [{"role": "user", "content": "a"}]
        longer = [
            *question,
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c d"},
        ]
        sampled = {"role": "assistant", "content": _PLACEHOLDER}

        def refuse(rule: str) -> ConfigError:
            fix = (
                "use a chat template that only appends turns, another model, or "
                "--env.name single_turn"
            )
            return ConfigError(
                [Problem("model.path", model_path, f"its chat template {rule}", fix)]
            )

        ends = set()
        for role in ("user", "tool") if tools else ("user",):
            new = [{"role": role, "content": "e"}]
            try:
                after = [self._after(old, new) for old in (question, longer)]
                opened = self._renderer.render(question, tools) + _PLACEHOLDER
                whole = self._renderer.render([*question, sampled, *new], tools)
            except (ChatError, TemplateFault) as error:
                raise refuse(
                    f"refuses a message of role {role} after the model's ({error})"
                ) from error
            if after[0] != after[1]:
                raise refuse(
                    f"renders a message of role {role} differently after a longer conversation"
                )
            if not whole.startswith(opened):
                raise refuse("moves or changes the model's message once another one follows")
            ends.add(self._renderer.tokens(after[0])[0])
        if len(ends) != 1 or not ends <= self._renderer.special:
            raise refuse(
                f"does not end the model's turn with one special token (but {sorted(ends)})"
            )
        (self.end,) = ends

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the first messages, up to where the model's message begins.

        Raises:
            ChatError: the template refuses the messages.
        """
        try:
            return self._renderer.tokens(self._renderer.render(messages, self._tools))
        except TemplateFault as error:
            raise ChatError(f"the chat template refuses these messages: {error}") from error

    def following(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Return the tokens that follow a message of the model, up to where the next one begins.

        Args:
            messages: the environment's.
            ended: whether the token that ends the model's turn was sampled; else it is included.

        Raises:
            ChatError: the template refuses the messages.
        """
        key = repr(messages)
        if key not in self._suffixes:
            try:
                text = self._after([{"role": "user", "content": "a"}], messages)
            except TemplateFault as error:
                raise ChatError(f"the chat template refuses {messages!r}: {error}") from error
            # Games repeat few messages, so caching pays; searches never do, so it is bounded.
            if len(self._suffixes) > 4096:
                self._suffixes.clear()
            self._suffixes[key] = tuple(self._renderer.tokens(text))
        tokens = list(self._suffixes[key])
        if tokens[0] != self.end:
            raise ChatError(f"the chat template does not end the model's turn before {messages!r}")
        return tokens[1:] if ended else tokens

    def _after(self, old: Sequence[Message], new: Sequence[Message]) -> str:
        return self._renderer.after(old, new, self._tools)
