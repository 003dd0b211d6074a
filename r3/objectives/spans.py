"""Find the tokens of the assistant messages in a conversation.

A conversation is rendered once. Its text is cut where an assistant message begins and where the
token that ends it has been, and each piece is tokenised once. A model that samples such a message
sees the same tokens before it: the text up to there is the chat template's own generation prompt.

A template without a closing token (GLM) ends a message by opening the next one. That token is the
one that the model samples to stop, so it is learned with the message: `<|observation|>` after a
call, `<|user|>` after others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3.data.conversation import is_learned
from r3.data.prompts import DataError
from r3.data.rendering import Rendered, TemplateFault
from r3.data.rows import RowProblem
from r3.data.template import Renderer
from r3.types import Message

_BY_ROW = "leave out what it drops, or write a row per assistant message"


def span_finder(renderer: Renderer, source: str) -> SpanFinder:
    """Return what finds assistant messages in the rows of a source.

    Raises:
        DataError: the chat template does not show where they begin and end.
    """
    try:
        return SpanFinder(renderer)
    except TemplateFault as error:
        rule = f"its chat template hides where an assistant message begins or ends: {error}"
        fix = "use another chat template"
        raise DataError([RowProblem(source, 0, "tokenizer", rule, fix)]) from error


class SpanFinder:
    """Finds assistant messages exactly, or refuses the conversation."""

    def __init__(self, renderer: Renderer) -> None:
        """Check that the chat template shows where an assistant message begins and ends.

        Raises:
            TemplateFault: it does not, or the tokenizer gives pieces of a text other tokens than
                the whole.
        """
        self._renderer = renderer
        self._special = set(map(renderer.text_of, renderer.special)) - {""}
        chat = [{"role": "user", "content": "a"}, _reply("b")]
        tokens, _ = self.find(chat, "", ())
        text = renderer.render(chat, opening=False) + self._opening(chat, 1)
        if renderer.tokens(text)[: len(tokens)] != tokens:
            raise TemplateFault("the tokenizer gives pieces of a text other tokens than the whole")

    def find(
        self, messages: Sequence[Message], answer: str, tools: Sequence[Any]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenise a conversation up to the end of its last assistant message that is learned.

        Args:
            messages: the conversation. `train` False leaves an assistant message out.
            answer: a last assistant message; "" = `messages` has it.
            tools: JSON schemas that the template shows.

        Returns:
            Token ids, and (first, end) of each message to learn. The token that ends a message
            belongs to it; the generation prompt before it and what the template writes after it
            do not.

        Raises:
            TemplateFault: the template refuses the messages, or renders them so that what a
                message says or what precedes it differs from what the model would see.
        """
        renderer = self._renderer
        messages = [*messages, *([_reply(answer)] if answer else [])]
        places = [place for place, message in enumerate(messages) if is_learned(message)]
        if places[0] == 0:
            rule = "message 0 is of the assistant, and nothing comes before it"
            raise TemplateFault(
                rule, "put a message of the user before it, or give it train: false"
            )

        def rendered(count: int, *, opening: bool = False) -> Rendered:
            return renderer.rendered(messages[:count], tools, opening=opening, rule="learned")

        whole = rendered(places[-1] + 1)
        text = whole.text + self._opening(messages, places[-1])
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        done = 0  # characters
        for place in places:
            before = rendered(place, opening=True).text
            start = len(before)
            if start < done or not whole.text.startswith(before):
                closed = rendered(place).text
                raise _moved(place, before, closed, goes_on=not whole.text.startswith(closed))
            alone = whole if place == places[-1] else rendered(place + 1)
            after = alone.text[alone.end_of(place) :] + self._opening(messages, place)
            end = self._end(place, whole, text, after)
            tokens += renderer.tokens(text[done:start])
            first, done = len(tokens), end
            tokens += renderer.tokens(text[start:end])
            spans.append((first, len(tokens)))
        return tokens, spans

    def _opening(self, messages: Sequence[Message], place: int) -> str:
        """The token that opens what follows a message, if that ends it; else nothing."""
        if self._renderer.closing is not None:
            return ""
        by_call = "tool" if messages[place].get("tool_calls") else "user"
        role = messages[place + 1]["role"] if place + 1 < len(messages) else by_call
        if role not in self._renderer.next_tokens:
            raise TemplateFault(f"no special token ends message {place}")
        return self._renderer.next_tokens[role]

    def _end(self, place: int, whole: Rendered, text: str, after: str) -> int:
        """Index after the token that ends a message.

        Args:
            whole: the whole conversation.
            text: the same, up to the token that ends its last message.
            after: what follows the message where the conversation ends with it, and that token.
        """
        if (said := whole.end_of(place)) < 0:
            raise TemplateFault(
                f"message {place} says nothing that could be learned", "leave it out"
            )
        ends = [(after.rfind(end) + len(end), end) for end in self._special if end in after]
        end, token = max(ends, default=(0, ""))
        if not token or after[end:].strip():
            raise TemplateFault(f"no special token ends message {place}")
        if not text.startswith(after[:end], said):
            rule = f"the chat template ends message {place} differently once the conversation goes"
            raise TemplateFault(f"{rule} on", "write a row per assistant message")
        if any(token in part.value for part in whole.parts if part.message == place):
            rule = f"message {place} holds {token!r}, which ends a message"
            raise TemplateFault(rule, "leave it out: the chat template writes it")
        return said + end


def _moved(place: int, before: str, closed: str, *, goes_on: bool) -> TemplateFault:
    """Why a conversation does not begin with what the model sees before it writes a message."""
    if goes_on or not before.startswith(closed):
        rule = (
            f"the chat template renders what precedes message {place} differently once the "
            "conversation goes on"
        )
        return TemplateFault(rule, _BY_ROW)
    rule = (
        f"the chat template asks for message {place} with {before[len(closed) :]!r}, and does not "
        "write that before a message that is there: the model would learn another beginning than "
        "the one it continues"
    )
    fix = "use a chat template that writes both alike (--data.template_kwargs may switch it)"
    return TemplateFault(rule, fix)


def _reply(content: str) -> Message:
    return {"role": "assistant", "content": content}
