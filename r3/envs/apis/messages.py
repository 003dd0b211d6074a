"""Anthropic's Messages API, as its coding agents use it: `/v1/messages` and its `count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from r3.data.conversation import read_json
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
from r3.envs.apis.memory import Memory, conversation, shown
from r3.envs.workflow import Model, ModelMessage

_TAKEN = {
    *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    # Without influence on what is sampled: whether the model thinks is the chat template's choice.
    *("metadata", "service_tier", "thinking", "context_management", "cache_control", "speed"),
    *("output_config", "diagnostics", "inference_geo"),
}
_DEFAULTS: dict[str, Any] = {"mcp_servers": [], "container": {}, "output_format": {}}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}
_ENDINGS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Claude Code's first block differs from request to request: no conversation would go on.
_BILLING = "x-anthropic-billing-header"
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as Claude Code writes one itself
_NOT_JSON = "not_json"  # what was sampled as arguments, where it is no object
# Some clients drop a thought without a signature.
_SIGNATURE = "r3"


def error_body(error: ApiError) -> dict[str, Any]:
    """The API's JSON of an error."""
    kind = "api_error" if error.status >= 500 else _KINDS.get(error.status, _KINDS[400])
    # The words by which clients know that they have to shorten a conversation.
    too_long = error.code == "context_length_exceeded"
    text = f"prompt is too long: {error}" if too_long else str(error)
    return {"type": "error", "error": {"type": kind, "message": text}}


def messages_request(body: Mapping[str, Any], memory: Memory, *, sampled: bool = True) -> Request:
    """Read the body of `/v1/messages`, or with `sampled=False` of its `count_tokens`.

    Raises:
        ApiError: it cannot be served.
    """
    check_body(body, _TAKEN, _DEFAULTS)
    if set(typed(body, "output_config", dict) or {}) - {"effort"}:
        text = "output_config: only effort is taken, as no grammar forces a format"
        raise ApiError(400, text, param="output_config")
    if sampled and body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: the API needs it", param="max_tokens")
    choice = typed(body, "tool_choice", dict) or {"type": "auto"}
    if choice.get("type") not in ("auto", "none") or choice.get("disable_parallel_tool_use"):
        text = f"tool_choice {choice!r}: only 'auto' and 'none' are supported"
        raise ApiError(400, text, param="tool_choice")
    declared = objects(body.get("tools") or [], "tools")
    tools, others = functions(declared, (None, "custom"), "input_schema")
    messages = list(_conversation(body))
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "messages must end with one of the user", param="messages")
    request = sampled_request(body, stop="stop_sequences", unused=others)
    request.arguments.update(
        messages=conversation(messages, memory, "messages"),
        tools=tools if choice["type"] == "auto" else [],
    )
    return request


def _conversation(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages as the chat API has them: a result of a tool is one of its own."""
    if system := _text(body.get("system"), "system"):
        yield {"role": "system", "content": system}
    turns: list[tuple[str, list[Mapping[str, Any]]]] = []
    for message in objects(body.get("messages"), "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            text = f"a message has the role {role!r}: user, assistant and system are known"
            raise ApiError(400, text, param="messages")
        is_text = isinstance(content, str)
        said: list[Any] = [{"type": "text", "text": content}]
        blocks = said if is_text else objects(content, "content")
        if role == "system":  # in the middle of a conversation, where few templates have one
            role, note = "user", _REMINDER.format(_text(blocks, "content"))
            blocks = [{"type": "text", "text": note}]
        if turns and turns[-1][0] == role:  # the API joins messages of one role
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, [*blocks]))
    if not turns:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    for role, blocks in turns:
        if role == "assistant":
            yield _reply(blocks)
        else:
            yield from _asked(blocks)


def _text(blocks: Any, name: str) -> str:
    text = text_of(blocks, ("text",), name)
    if _BILLING not in text:
        return text
    kept = [block for block in blocks if not block["text"].startswith(_BILLING)]
    return text_of(kept, ("text",), name) if isinstance(blocks, list) else ""


def _asked(blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the user says and what tools returned, in its order."""
    for is_result, part in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if not is_result:
            yield {"role": "user", "content": _text(list(part), "content")}
            continue
        for block in part:
            result = text_of(block.get("content"), ("text",), "tool_result")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}


def _reply(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A message of the model."""
    content, reasoning, calls = "", "", []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            content += typed(block, "text", str) or ""
        elif kind == "thinking":
            reasoning += typed(block, "thinking", str) or ""
        elif kind == "tool_use":
            arguments = block.get("input")
            if isinstance(arguments, dict) and arguments.keys() == {_NOT_JSON}:
                arguments = arguments[_NOT_JSON]
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            text = f"a block of type {kind!r} in a message of the assistant is not supported"
            raise ApiError(400, text, param="messages")
    message = {"role": "assistant", "content": content, "reasoning": reasoning or None}
    return {**message, "tool_calls": calls or None}


def messages_reply(
    message: ModelMessage, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """The reply to a request: one body, or the events of a stream."""
    reply = shown(message, memory, request)
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = {"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE}
        blocks.append(thought)
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"]})
        blocks[-1]["input"] = _object(call["arguments"])
    by_string = reply.stopped_by is not None and reply.ending == "stop"
    ending = {
        "stop_reason": "stop_sequence" if by_string else _ENDINGS[reply.ending],
        "stop_sequence": reply.stopped_by if by_string else None,
    }
    usage = {
        "input_tokens": reply.completion.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(reply.completion.tokens),
    }
    head = {"id": f"msg_{memory.num_replies}", "type": "message", "role": "assistant"}
    whole = {**head, "model": MODEL, "content": blocks, **ending, "usage": usage}
    if not request.stream:
        return [whole]
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun = {**whole, **empty, "usage": usage | {"output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        start, deltas = _pieces(block)
        events += [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]
    last = {"type": "message_delta", "delta": ending, "usage": usage}
    return [*events, last, {"type": "message_stop"}]


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The beginning of a block in a stream, and what follows."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    arguments = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _object(arguments: str) -> dict[str, Any]:
    """Arguments of a call, which the API has as an object only."""
    try:
        value = read_json(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {_NOT_JSON: value}
