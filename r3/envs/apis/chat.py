"""OpenAI's APIs of chats and of completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from r3.envs.apis.common import (
    MODEL,
    ApiError,
    Request,
    check_body,
    most_tokens,
    objects,
    sampled_request,
    typed,
)
from r3.envs.apis.memory import Memory, before_stop, conversation, shown
from r3.envs.apis.tokens import logprobs_of, usage_of
from r3.envs.workflow import Completion, Model, ModelMessage

# Fields of both of OpenAI's older APIs; the last ones are labels without influence on what is
# sampled. A call's seed is derived from the run's.
TAKEN = {
    *("max_tokens", "stop", "stream", "stream_options", "logprobs"),
    *("return_token_ids", "request_id"),
    *("metadata", "prompt_cache_key", "safety_identifier", "seed", "service_tier", "store", "user"),
}
_CHAT = {"messages", "tools", "tool_choice", "max_completion_tokens"}
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "suffix": "",
    "top_logprobs": 0,
}
"""What may only have the value that it has by default."""

MODEL_ENTRY = {"id": MODEL, "object": "model", "created": 0, "owned_by": "r3"}
"""The only entry of `/v1/models`."""


def chat_request(body: Mapping[str, Any], memory: Memory) -> Request:
    """Read the body of `/v1/chat/completions`.

    Raises:
        ApiError: it cannot be served.
    """
    check_body(body, TAKEN | _CHAT, DEFAULTS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    choice = chosen(body)
    tools = objects(typed(body, "tools", list) or [], "tools")
    request = sampled_request(body, logprobs=bool(typed(body, "logprobs", bool)))
    most = most_tokens(body, "max_completion_tokens")
    request.arguments.update(
        messages=conversation(messages, memory, "messages"),
        tools=tools if choice == "auto" else [],
        max_tokens=request.arguments["max_tokens"] if most is None else most,
    )
    return request


def chosen(body: Mapping[str, Any]) -> str:
    """The value of `tool_choice`: "auto" or "none".

    Raises:
        ApiError: it would force a call.
    """
    if (choice := body.get("tool_choice") or "auto") not in ("auto", "none"):
        text = f"tool_choice {choice!r}: only 'auto' and 'none' are supported"
        raise ApiError(400, text, param="tool_choice")
    return str(choice)


def chat_reply(message: ModelMessage, request: Request, memory: Memory, model: Model) -> list[Any]:
    """The reply to a chat request: one body, or the events of a stream."""
    reply = shown(message, memory, request)
    text = None if reply.calls and not reply.content else reply.content
    said: dict[str, Any] = {"role": "assistant", "content": text}
    if reply.reasoning:  # under the name that vLLM uses
        said["reasoning"] = reply.reasoning
    calls: list[dict[str, Any]] = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in reply.calls
    ]
    logprobs = logprobs_of(reply.completion, model) if request.logprobs else None
    if not request.stream:
        said |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
        choice = {"index": 0, "message": said, "logprobs": logprobs, "finish_reason": reply.ending}
        return bodies("chat.completion", memory, [choice], request, reply.completion)
    if calls:
        said["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    choices = [
        {"index": 0, "delta": said, "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.ending},
    ]
    return bodies("chat.completion.chunk", memory, choices, request, reply.completion)


def completion_request(body: Mapping[str, Any], memory: Memory) -> Request:
    """Read the body of `/v1/completions`.

    Raises:
        ApiError: it cannot be served.
    """
    check_body(body, TAKEN | {"prompt"}, DEFAULTS)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if not isinstance(prompt, str | list) or (
        isinstance(prompt, list) and not all(type(token) is int for token in prompt)
    ):
        raise ApiError(400, "prompt must be one text or one list of token ids", param="prompt")
    if typed(body, "logprobs", int):
        text = "logprobs: only 0, the log-probabilities of the sampled tokens, is supported"
        raise ApiError(400, text, param="logprobs")
    request = sampled_request(body, logprobs=body.get("logprobs") is not None)
    request.arguments["prompt"] = prompt
    return request


def completion_reply(
    completion: Completion, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """The reply to a completion request: one body, or the events of a stream."""
    logprobs: Any = None
    if request.logprobs:
        pieces = [model.token_bytes(token).decode(errors="replace") for token in completion.tokens]
        logprobs = {"tokens": pieces, "token_logprobs": list(completion.logprobs)}
        logprobs |= {"top_logprobs": None, "text_offset": None}
    choice = {"index": 0, "text": before_stop(completion.text, request), "logprobs": logprobs}
    choice["finish_reason"] = completion.finish_reason
    return bodies("text_completion", memory, [choice], request, completion)


def bodies(
    kind: str, memory: Memory, choices: list[Any], request: Request, completion: Completion
) -> list[Any]:
    """One body with token counts, or an event per choice and, if asked for, one with the counts."""
    head = {"id": f"reply-{memory.num_replies}", "object": kind, "created": int(time.time())}
    head["model"] = MODEL
    usage = usage_of(completion)
    if request.token_ids:
        head |= {"prompt_token_ids": list(completion.prompt)}
        choices[0]["token_ids"] = list(completion.tokens)
    if not request.stream:
        return [head | {"choices": choices, "usage": usage}]
    events = [head | {"choices": [choice]} for choice in choices]
    return [*events, head | {"choices": [], "usage": usage}] if request.usage else events
