"""Parse a message of the model into reasoning, text and tool calls.

Without a name in `env.tool_parser` calls are read here, in the format of Hermes and Qwen templates.
Named parsers are vLLM's (`r3.envs.parsers`). A model may sample any text, and parsers fail on
some: every parser is called by a `MessageReader`, which reads a message or leaves it as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3.data.conversation import arguments_of, read_json
from r3.runtime.terminal import say
from r3.user_code.calls import own_copy
from r3.user_code.loading import time_limit

_CALL_MARKS = re.compile("</?think>|</?tool_call>")

_LIMIT_S = 5.0  # of one message, which takes milliseconds
_MOST_LATE = 3  # messages of a round that may take that long
_SHOWN = 200  # characters of a message in the warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A message of the model, taken apart.

    Attributes:
        content: what is neither reasoning nor a call.
        calls: `{"name": ..., "arguments": {...}}` of each tool call.
        reasoning: what the model thought; None without `env.reasoning_parser`, or if there is none.
        fault: why a parser that raises nothing could read no call; empty if it has not failed.
    """

    content: str
    calls: list[dict[str, Any]]
    reasoning: str | None = None
    fault: str = ""

    def fields(self) -> dict[str, Any]:
        """Fields of a message besides its content: `tool_calls`, and `reasoning` if there is any.

        A copy each time: users' code gets messages and may change them.
        """
        reasoning = {} if self.reasoning is None else {"reasoning": self.reasoning}
        return {"tool_calls": own_copy(self.calls), **reasoning}


Parse = Callable[[str, Sequence[int]], Parsed]
"""Takes the text of a message and its tokens."""

Parser = Callable[[Sequence[Mapping[str, Any]]], Parse]
"""Takes the tools of a conversation, as JSON schemas. Raises ValueError if they cannot be used."""


class MessageReader:
    """Reads messages of the model with a parser that may fail or take forever.

    A message that the parser cannot read is text without calls. `take_unread` counts such messages,
    and the first one is printed. A parser gets 5 s per message. The engine waits meanwhile, so
    after three messages of a round that took longer R3 does not try others that are as long.
    """

    def __init__(self, parser: Parser, *, limit_s: float = _LIMIT_S) -> None:
        self._parser, self._limit_s = parser, limit_s
        self._unread = 0
        self._late: list[int] = []  # characters of messages that took too long
        self._is_said = False

    def __call__(self, tools: Sequence[Mapping[str, Any]]) -> Parse:
        """Return what reads messages of a conversation with these tools.

        Raises:
            ValueError: the parser cannot use them.
        """
        try:
            parse = self._parser(tools)
        except Exception as error:  # of a third party's parser
            raise ValueError(f"{type(error).__name__}: {error}") from error

        def read(text: str, tokens: Sequence[int]) -> Parsed:
            if len(self._late) >= _MOST_LATE and len(text) >= min(self._late):
                return self._text(text, "it is as long as messages that took too long")
            try:
                parsed = time_limit(lambda: parse(text, tokens), self._limit_s, TimeoutError)
            except TimeoutError:
                self._late.append(len(text))
                return self._text(text, f"it took longer than {self._limit_s:g} s")
            except Exception as error:  # a third party's parser raises anything for odd texts
                return self._text(text, f"{type(error).__name__}: {str(error)[:_SHOWN]}")
            if parsed.fault:
                self._text(text, parsed.fault[:_SHOWN])
            return parsed

        return read

    def take_unread(self) -> int:
        """Return how many messages could not be read since the last call."""
        count, self._unread = self._unread, 0
        self._late.clear()
        return count

    def _text(self, text: str, why: str) -> Parsed:
        self._unread += 1
        if not self._is_said:
            self._is_said = True
            say(
                f"warning: the parser of tool calls or reasoning failed on a message ({why}). The "
                "message is kept as text without calls; env/unread counts such messages. It begins "
                f"with {text[:_SHOWN]!r}",
                error=True,
            )
        return Parsed(content=text, calls=[])


def built_in(tools: Sequence[Mapping[str, Any]]) -> Parse:
    """Read `<tool_call>` with JSON inside; tools do not matter."""
    return lambda text, tokens: parsed_calls(text)


def parsed_calls(text: str) -> Parsed:
    """Read `{"name": ..., "arguments": {...}}` in each `<tool_call>` of a message.

    As vLLM's parser `hermes`, it takes no call without "arguments", and arguments that are the JSON
    text of an object. Calls in another form are left out; the content has them if there are no
    others.
    """
    texts = call_texts(text)
    calls = [call for _, inside in texts if (call := _call(inside))]
    return Parsed(content=text[: texts[0][0]].strip() if calls else text, calls=calls)


def call_texts(text: str) -> list[tuple[int, str]]:
    """Return where each `<tool_call>` of a message begins, and the text up to `</tool_call>`.

    Those in a thought are left out: between `<think>` and `</think>` or the end of the message, and
    before a `</think>` whose beginning was in the prompt.
    """
    texts: list[tuple[int, str]] = []
    opened: re.Match[str] | None = None
    thinks = False
    for mark in _CALL_MARKS.finditer(text):
        if opened:
            if mark[0] == "</tool_call>":
                texts.append((opened.start(), text[opened.end() : mark.start()]))
                opened = None
        elif mark[0] == "</think>":
            texts, thinks = texts if thinks else [], False
        elif mark[0] == "<think>":
            thinks = True
        elif mark[0] == "<tool_call>" and not thinks:
            opened = mark
    return texts


def call_of(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call as environments get it.

    Args:
        arguments: an object or its JSON text. Some models and parsers write null, or an empty text,
            where there are none.

    Raises:
        ValueError: see `arguments_of`.
    """
    parsed = arguments_of(arguments)
    return {"name": name, "arguments": {} if parsed in (None, "") else parsed}


def _call(text: str) -> dict[str, Any] | None:
    try:
        parsed = read_json(text)
        if not isinstance(parsed, dict) or "arguments" not in parsed:
            return None
        call = call_of(parsed.get("name"), parsed["arguments"])
    except ValueError:
        return None
    is_call = isinstance(call["name"], str) and isinstance(call["arguments"], dict)
    return call if is_call else None
