"""Messages of the model as the client of an API sees them, and sends them back.

A message with tool calls or reasoning is shown to the client as its API has it, these beside the
text. When it comes back unchanged, after the same messages, it is what was sampled again: else the
chat template would render it otherwise, and the conversation would begin a new token sequence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r3.data.conversation import read_message
from r3.envs.apis.common import ApiError, Request
from r3.envs.workflow import Completion, ModelMessage
from r3.errors import Fault


@dataclass(kw_only=True, slots=True)
class Memory:
    """What an episode's replies had.

    Attributes:
        said: messages that the client saw otherwise than they were sampled, by their place (see
            `_place`) and by what it saw. Other conversations may have the same words.
        num_replies: replies so far.
        num_calls: tool calls so far.
    """

    said: dict[tuple[int, str], str] = field(default_factory=dict)
    num_replies: int = 0
    num_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A message of the model as its client sees it.

    Attributes:
        content: the text, up to the string at which the request stopped it.
        reasoning: what the model thought, likewise; empty if nothing.
        calls: `{"id": ..., "name": ..., "arguments": ...}` of each tool call.
        ending: "stop", "length" or "tool_calls".
        stopped_by: the string of the request that stopped it; None if none did.
        completion: what was sampled.
    """

    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    ending: str
    stopped_by: str | None
    completion: Completion


_NOWHERE = 0


def conversation(messages: Iterable[Any], memory: Memory, name: str) -> list[dict[str, Any]]:
    """The messages of a client in the form of `r3.data.conversation`, the model's as sampled.

    Args:
        messages: as the chat API has them.
        name: of the field that they come from.

    Raises:
        ApiError: one of them is no message.
    """
    plain: list[dict[str, Any]] = []
    place = _NOWHERE
    for message in messages:
        plain.append(_plain(message, place, memory, name))
        place = _place(place, plain[-1])
    return plain


def _place(before: int, message: Mapping[str, Any]) -> int:
    """The place in a conversation after a message; white space at its ends does not matter."""
    return hash((before, repr({**message, "content": (message.get("content") or "").strip()})))


def _plain(message: Any, place: int, memory: Memory, name: str) -> dict[str, Any]:
    try:
        plain = read_message(message, of_model=True)
    except Fault as fault:
        raise ApiError(400, f"a message {fault}", param=name) from None
    calls = plain.get("tool_calls", [])
    if not all("id" in call for call in calls):
        raise ApiError(400, "tool_calls need an id each", param=name)
    ids = [str(call["id"]) for call in calls]
    parsed = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    seen = _seen(plain["content"] or "", plain.get("reasoning"), ids, parsed)
    said = memory.said.get((place, seen))
    if said is not None and plain["role"] == "assistant":
        return {"role": "assistant", "content": said}
    return plain


def _seen(content: str, reasoning: Any, ids: Sequence[str], calls: Sequence[Any]) -> str:
    """What a client sees of a message, in one form; white space at the ends does not matter."""
    return repr((content.strip(), str(reasoning or "").strip(), tuple(ids), _same(list(calls))))


def _same(value: Any) -> Any:
    """JSON as other languages write it again: JavaScript has 1 for 1.0, and orders keys itself."""
    if isinstance(value, Mapping):
        return sorted((str(key), _same(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return [_same(entry) for entry in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1000:
        return value + 0.0  # and 0 for -0.0
    return value


def _before_stop(text: str, ends: Iterable[str]) -> tuple[str, str | None]:
    """A text up to the string at which the request stopped it, and that string."""
    places = [(text.find(stop), stop) for stop in ends if stop in text]
    if not places:
        return text, None
    place, end = min(places)
    return text[:place], end


def before_stop(text: str, request: Request) -> str:
    """A text up to the string at which the request stopped it; the tokens of that stay sampled."""
    return _before_stop(text, request.arguments["stop"])[0]


def shown(message: ModelMessage, memory: Memory, request: Request) -> Reply:
    """The message as a client sees it, and remember it."""
    said, text, completion = message.parsed, message["content"], message.completion
    content, stopped_by = _before_stop(said.content, request.arguments["stop"])
    reasoning = before_stop(said.reasoning or "", request)
    calls = []
    for call in said.calls:
        memory.num_calls += 1
        # A text is what was no JSON.
        arguments = call["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        # Nine letters and digits, the same in every run: some templates show them, some check that.
        made = {"id": f"call{memory.num_calls:05d}", "name": call["name"], "arguments": arguments}
        calls.append(made)
    ids = [str(call["id"]) for call in calls]
    parsed = [(call["name"], call["arguments"]) for call in said.calls]
    seen = _seen(content, reasoning, ids, parsed)
    place = functools.reduce(_place, request.arguments["messages"], _NOWHERE)
    if calls or reasoning or content != text or (place, seen) in memory.said:
        memory.said[place, seen] = text
    # A message that was cut may have lost its last call: "length", as OpenAI says.
    is_whole = completion.finish_reason == "stop"
    ending = "tool_calls" if calls and is_whole else completion.finish_reason
    return Reply(
        content=content,
        reasoning=reasoning,
        calls=calls,
        ending=ending,
        stopped_by=stopped_by,
        completion=completion,
    )
