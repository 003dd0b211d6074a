"""OpenAI's Responses API, as coding agents use it: `/v1/responses`. The endpoint keeps no state."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Mapping
from typing import Any

from r3.envs.apis.chat import chosen
from r3.envs.apis.common import (
    MODEL,
    ApiError,
    Request,
    check_body,
    functions,
    objects,
    sampled_request,
    text_of,
    typed,
)
from r3.envs.apis.memory import Memory, Reply, conversation, shown
from r3.envs.workflow import Model, ModelMessage

_TAKEN = {
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream"),
    *("stream_options", "include", "text"),
    # Without influence on what is sampled: whether the model thinks, and how many calls a message
    # has, is up to the model and its chat template.
    *("metadata", "client_metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning"),
    *("safety_identifier", "service_tier", "store", "user", "parallel_tool_calls"),
}
_DEFAULTS: dict[str, Any] = {"background": False, "truncation": "disabled", "top_logprobs": 0}
_THOUGHT = "reasoning.encrypted_content"
_UTF8 = {"errors": "surrogatepass"}  # a model may write half of a character
_MORE_TOOLS = "additional_tools"
_TEXTS = ("input_text", "output_text", "text")


def responses_request(body: Mapping[str, Any], memory: Memory) -> Request:
    """Read the body of `/v1/responses`.

    Raises:
        ApiError: it cannot be served.
    """
    if body.get("previous_response_id") is not None:
        text = "previous_response_id: no response is kept here. Send the whole input"
        raise ApiError(400, text, param="previous_response_id")
    check_body(body, _TAKEN, _DEFAULTS)
    if others := [name for name in typed(body, "include", list) or [] if name != _THOUGHT]:
        raise ApiError(400, f"include = {others!r}: only {_THOUGHT!r} is known", param="include")
    form = typed(typed(body, "text", dict) or {}, "format", dict)
    if form and form.get("type") != "text":
        text = f"text.format = {form!r}: only text is supported, as no grammar forces another"
        raise ApiError(400, text, param="text")
    choice = chosen(body)
    items = body.get("input") or []
    items = objects(
        [{"role": "user", "content": items}] if isinstance(items, str) else items, "input"
    )
    declared = [*objects(body.get("tools") or [], "tools")]
    for item in items:  # Codex has some of its tools there
        if item.get("type") == _MORE_TOOLS:
            declared += objects(item.get("tools"), "tools")
    tools, others = functions(declared, ("function",), "parameters")
    said = [item for item in items if item.get("type") != _MORE_TOOLS]
    messages = list(_conversation(body, said))
    if not messages:
        raise ApiError(400, "input must be a text or a list of at least one item", param="input")
    request = sampled_request(body, max_tokens="max_output_tokens", unused=others)
    request.arguments.update(
        messages=conversation(messages, memory, "input"), tools=tools if choice == "auto" else []
    )
    return request


def _conversation(
    body: Mapping[str, Any], items: list[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The items as messages of the chat API; what the developer says first is one message."""
    rules = [typed(body, "instructions", str) or ""]
    reply: dict[str, Any] = {}
    for item in items:
        kind = item.get("type", "message")
        role = item.get("role") if kind == "message" else None
        is_reply = role == "assistant" or kind in ("reasoning", "function_call")
        if role in ("system", "developer") and rules:
            rules.append(text_of(item.get("content"), _TEXTS, "input"))
            continue
        if text := "\n\n".join(filter(None, rules)):
            yield {"role": "system", "content": text}
        rules = []
        # Reasoning, text and calls follow one another in this order in one message.
        begins = kind == "reasoning" or (
            role == "assistant" and {"content", "tool_calls"} & {*reply}
        )
        if reply and (begins or not is_reply):
            yield reply
            reply = {}
        if is_reply:
            reply = {"role": "assistant", **reply, **_part(item, kind, reply)}
        elif kind == "function_call_output":
            result = text_of(item.get("output"), _TEXTS, "input")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": result}
        elif role in ("user", "system", "developer"):
            role = "user" if role == "user" else "system"
            yield {"role": role, "content": text_of(item.get("content"), _TEXTS, "input")}
        else:
            text = f"an item of type {kind!r} and role {role!r} is not supported"
            raise ApiError(400, text, param="input")
    if text := "\n\n".join(filter(None, rules)):
        yield {"role": "system", "content": text}
    if reply:
        yield reply


def _part(item: Mapping[str, Any], kind: Any, reply: Mapping[str, Any]) -> dict[str, Any]:
    """What an item adds to a message of the model."""
    if kind == "message":
        return {"content": text_of(item.get("content"), _TEXTS, "input")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"tool_calls": [*reply.get("tool_calls", []), call]}
    if (sealed := typed(item, "encrypted_content", str)) is not None:
        try:
            return {"reasoning": base64.b64decode(sealed, validate=True).decode(**_UTF8)}
        except (binascii.Error, UnicodeDecodeError):
            text = "encrypted_content: it is of another model, which alone can read it"
            raise ApiError(400, text, param="input") from None
    return {"reasoning": text_of(item.get("content"), ("reasoning_text",), "input")}


def responses_reply(
    message: ModelMessage, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """The reply to a request: one body, or the events of a stream."""
    reply, body = shown(message, memory, request), request.body
    number, completion = memory.num_replies, reply.completion
    status = "incomplete" if reply.ending == "length" else "completed"
    items = _items(reply, number)
    items[-1]["status"] = status
    usage = {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(completion.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": completion.prompt_tokens + len(completion.tokens),
    }
    begun: dict[str, Any] = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": MODEL,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }
    whole = begun | {"status": status, "output": items, "usage": usage}
    if status == "incomplete":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    if not request.stream:
        return [whole]
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(items):
        where = {"item_id": item["id"], "output_index": index}
        events += [{"type": "response.output_item.added", "output_index": index, "item": {}}]
        events[-1]["item"] = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        events += [{**event, **where} for event in _pieces(item)]
        events += [{"type": "response.output_item.done", "output_index": index, "item": item}]
    events.append({"type": f"response.{status}", "response": whole})
    return [{**event, "sequence_number": place} for place, event in enumerate(events)]


def _items(reply: Reply, number: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        # It comes back sealed: clients leave the text out.
        sealed = base64.b64encode(reply.reasoning.encode(**_UTF8)).decode()
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": []})
        items[-1] |= {"content": [thought], "encrypted_content": sealed}
    if reply.content or not reply.calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant"})
        items[-1]["content"] = [text]
    for call in reply.calls:
        items.append({"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]})
        items[-1] |= {"name": call["name"], "arguments": call["arguments"]}
    return [{**item, "status": "completed"} for item in items]


_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}


def _pieces(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an item in a stream, between its beginning and its end."""
    if item["type"] == "function_call":
        name, arguments = "response.function_call_arguments", item["arguments"]
        done = {"type": f"{name}.done", "name": item["name"], "arguments": arguments}
        return [{"type": f"{name}.delta", "delta": arguments}, done]
    (part,) = item["content"]
    name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
    rest: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
    events: list[dict[str, Any]] = [
        {"type": "response.content_part.added", "part": {**part, "text": ""}},
        {"type": f"{name}.delta", "delta": part["text"], **rest},
        {"type": f"{name}.done", "text": part["text"], **rest},
        {"type": "response.content_part.done", "part": part},
    ]
    return [{**event, "content_index": 0} for event in events]
