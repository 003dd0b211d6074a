"""Where the assistant messages are among the tokens of a conversation.

A conversation is rendered once. Its text is cut where an assistant message begins and where the
token that ends it has been, and each piece is tokenised once. A model that samples such a message
sees the same tokens before it: the text up to there is the chat template's own generation prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from r3.data.template import TemplateFault, apply_template
from r3.types import Message

# Stands for a message. No template changes letters and digits.
_PLACEHOLDER = "R3messageofthemodel"


class SpanFinder:
    """Finds assistant messages exactly, or refuses the conversation.

    Attributes:
        end: the text of the token that ends an assistant message.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        """Learn from the chat template which token ends an assistant message.

        Raises:
            TemplateFault: no special token ends it, or the tokenizer gives pieces of a text other
                tokens than the whole.
        """
        self._tokenizer, self._variables = tokenizer, template_kwargs
        question = {"role": "user", "content": "a"}
        whole = self._render([question, _reply(_PLACEHOLDER)], None, opening=False)
        _, found, after = whole.partition(_PLACEHOLDER)
        ids = self._tokens(after.lstrip())
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if not found or not ids or ids[0] not in special:
            raise TemplateFault("no special token follows an assistant message")
        self.end: str = tokenizer.decode(ids[:1])
        tokens, _ = self.find([question], "b", None)
        whole = self._render([question, _reply("b")], None, opening=False)
        if self._tokens(whole)[: len(tokens)] != tokens:
            raise TemplateFault("the tokenizer gives pieces of a text other tokens than the whole")

    def find(
        self, messages: Sequence[Message], answer: str, tools: Any
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenise a conversation up to the end of its last assistant message.

        Args:
            messages: the conversation.
            answer: a last assistant message; "" = `messages` has it.
            tools: JSON schemas that the template shows, or None.

        Returns:
            Token ids, and (first, end) of each assistant message. The token that ends a message
            belongs to it; the generation prompt before it and what the template writes after it
            do not.

        Raises:
            TemplateFault: the template refuses the messages, or renders them so that what a
                message says or what precedes it differs from what the model would see.
        """
        messages = [*messages, *([_reply(answer)] if answer else [])]
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole = self._render(messages[: places[-1] + 1], tools, opening=False)
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        done = 0  # characters
        for place in places:
            before = self._render(messages[:place], tools, opening=True)
            start = len(before)
            if start < done or not whole.startswith(before):
                raise TemplateFault(
                    f"it renders what precedes message {place} differently once the conversation "
                    "goes on; write a row per assistant message"
                )
            end = whole.find(self.end, start)
            if end < 0 or str(messages[place]["content"]).strip() not in whole[start:end]:
                raise TemplateFault(
                    f"it does not render message {place} unchanged and ended by {self.end!r}; "
                    "leave out what it drops, or write a row per assistant message"
                )
            tokens += self._tokens(whole[done:start])
            first, done = len(tokens), end + len(self.end)
            tokens += self._tokens(whole[start:done])
            spans.append((first, len(tokens)))
        return tokens, spans

    def _render(self, messages: Sequence[Message], tools: Any, *, opening: bool) -> str:
        text: str = apply_template(
            self._tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=opening,
            tokenize=False,
            **self._variables,
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _reply(content: str) -> Message:
    return {"role": "assistant", "content": content}
