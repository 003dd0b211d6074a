"""What a message of the model says: reasoning, text and tool calls.

Without a name in `env.tool_parser` calls are read here, in the format of Hermes and Qwen templates;
named parsers are vLLM's (`r3.engine.parsers`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3.runtime.exchange import own_copy

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A message of the model, taken apart.

    Attributes:
        content: what is neither reasoning nor a call.
        calls: `{"name": ..., "arguments": {...}}` of each tool call.
        reasoning: what the model thought; None without `env.reasoning_parser`, or if there is none.
    """

    content: str
    calls: list[dict[str, Any]]
    reasoning: str | None = None

    def fields(self) -> dict[str, Any]:
        """What a message has beside its content: `tool_calls`, and `reasoning` if there is any.

        A copy each time: users' code gets messages and may change them.
        """
        reasoning = {} if self.reasoning is None else {"reasoning": self.reasoning}
        return {"tool_calls": own_copy(self.calls), **reasoning}


Parse = Callable[[str, Sequence[int]], Parsed]
"""Takes the text of a message and its tokens."""

Parser = Callable[[Sequence[Mapping[str, Any]]], Parse]
"""Takes the tools of a conversation, as JSON schemas. Raises ValueError if they cannot be used."""


def built_in(tools: Sequence[Mapping[str, Any]]) -> Parse:
    """Read `<tool_call>` with JSON inside; tools do not matter."""
    return _parse


def _parse(text: str, tokens: Sequence[int]) -> Parsed:
    calls = parse_tool_calls(text)
    return Parsed(content=text.partition("<tool_call>")[0].strip() if calls else text, calls=calls)


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """Return `{"name": ..., "arguments": {...}}` of each `<tool_call>` that holds such JSON.

    Calls in another form are left out; the text still has them.
    """
    calls = []
    for content in _CALL.findall(text):
        try:
            call = json.loads(content)
        except ValueError:
            continue
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            continue
        arguments = call.get("arguments", {})
        if isinstance(arguments, dict):
            calls.append({"name": call["name"], "arguments": arguments})
    return calls
