"""Serve the requests of one episode: read them, call its model, reply in the language of each API.

A refused request is counted by the model (`Model.refused`); one that belongs to no episode is
printed once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from r3.data.conversation import read_json
from r3.envs.apis.chat import (
    MODEL_ENTRY,
    chat_reply,
    chat_request,
    completion_reply,
    completion_request,
)
from r3.envs.apis.common import ApiError, Request, check_fields, check_model, typed
from r3.envs.apis.memory import Memory
from r3.envs.apis.messages import error_body, messages_reply, messages_request
from r3.envs.apis.responses import responses_reply, responses_request
from r3.envs.apis.tokens import tokens_reply, tokens_request
from r3.envs.workflow import EpisodeOver, Model, ModelLimit
from r3.runtime.terminal import say

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_T = TypeVar("_T")
# A token of text has three or four characters, each at most six bytes of JSON.
_BYTES_PER_TOKEN = 256
_SMALLEST_LIMIT = 1 << 20
_RESPONSES, _ANTHROPIC = "/v1/responses", "/v1/messages"
_EVENTS = "text/event-stream"
_SILENT_S = 15.0  # of a stream; proxies close one after 60 s, clients after some minutes


@dataclass(kw_only=True, slots=True)
class Access:
    """What one episode's agent needs.

    Attributes:
        base_url: for OPENAI_BASE_URL.
        api_key: for OPENAI_API_KEY; valid until the episode is over.
        limit: the limit that the last request met; None if it met none.
        running: requests that the model has not answered yet, with the names that their client
            gave them; None if it was aborted.
    """

    model: Model
    base_url: str
    api_key: str
    limit: ModelLimit | None = None
    memory: Memory = field(default_factory=Memory)
    running: dict[asyncio.Future[Any], str | None] = field(default_factory=dict)


Handler = Callable[["HttpRequest", Access], Awaitable["Response"]]
_Read = Callable[[Mapping[str, Any], Memory], Request]
_Write = Callable[[Any, Request, Memory, Model], list[Any]]


def _sampler(read: _Read, write: _Write) -> Handler:
    """What serves an API whose requests are calls of the model."""

    async def handle(request: HttpRequest, access: Access) -> Response:
        model, memory = access.model, access.memory
        wanted = read(await _body(request, access), memory)
        call = model.complete if "prompt" in wanted.arguments else model.chat
        called = asyncio.ensure_future(_called(request, access, wanted, call(**wanted.arguments)))
        if not wanted.stream:
            return _json(write(await called, wanted, memory, model)[0])
        await asyncio.wait({called}, timeout=_SILENT_S)
        if not called.done():
            return _waiting(request, called, lambda said: write(said, wanted, memory, model))
        from starlette.responses import Response

        events = _events(write(await called, wanted, memory, model))
        return Response(events, media_type=_EVENTS)

    return handle


async def _count_tokens(request: HttpRequest, access: Access) -> Response:
    wanted = messages_request(await _body(request, access), access.memory, sampled=False)
    try:
        count = access.model.num_tokens(wanted.arguments["messages"], wanted.arguments["tools"])
    except (ModelLimit, ValueError) as error:
        raise _refusal(error) from error
    return _json({"input_tokens": count})


async def _models(request: HttpRequest, access: Access) -> Response:
    entry = MODEL_ENTRY | {"max_model_len": access.model.max_tokens_total}  # vLLM's name for it
    if "name" not in request.path_params:
        return _json({"object": "list", "data": [entry]})
    check_model(request.path_params["name"])
    return _json(entry)


async def _abort(request: HttpRequest, access: Access) -> Response:
    """End requests of the episode that are running; without names all of them, as vLLM's does."""
    body = await _body(request, access)
    check_fields(body, {"request_ids"})
    names = typed(body, "request_ids", list)
    ended = [task for task, name in access.running.items() if names is None or name in names]
    for task in ended:
        access.model.refused["aborted"] += 1
        access.running[task] = None
        task.cancel()
    return _json({"aborted": len(ended)})


HANDLERS: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/chat/completions", _sampler(chat_request, chat_reply)),
    ("POST", _RESPONSES, _sampler(responses_request, responses_reply)),
    ("POST", _ANTHROPIC, _sampler(messages_request, messages_reply)),
    ("POST", "/v1/messages/count_tokens", _count_tokens),
    ("POST", "/v1/completions", _sampler(completion_request, completion_reply)),
    ("POST", "/inference/v1/generate", _sampler(tokens_request, tokens_reply)),
    ("POST", "/abort_requests", _abort),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{name}", _models),
]
"""Method and path of what is served, and what serves it."""


async def answered(request: HttpRequest, access: Access | None, handle: Handler) -> Response:
    """Answer a request; errors get the form of their API.

    Args:
        access: the episode that its token belongs to; None if there is none.
    """
    from starlette.requests import ClientDisconnect

    try:
        if access is None:
            text = "the token belongs to no episode, or its episode is over"
            raise ApiError(401, text, code="invalid_api_key")
        return await handle(request, access)
    except ApiError as error:
        refused = f"the endpoint refused {request.method} {request.url.path[:100]}: {error}"
        if access is None:
            _say_once(f"{refused} (others are not shown)", "stranger", everywhere=True)
        elif error.__cause__ is None:  # else the model has refused and counted it
            access.model.refused["invalid"] += 1
            _say_once(f"{refused}. Metric env/refused_invalid counts the others", "invalid")
        return error_reply(request, error)
    except ClientDisconnect:  # in the middle of the body; nobody reads the reply
        assert access is not None
        access.model.refused["hung_up"] += 1
        return _json({}, 400)


def error_reply(request: HttpRequest, error: ApiError) -> Response:
    """The reply to a request that is refused, in the form of its API."""
    return _json(_error(request, error), error.status)


def _error(request: HttpRequest, error: ApiError) -> dict[str, Any]:
    return error_body(error) if request.url.path.startswith(_ANTHROPIC) else error.body


async def not_served(request: HttpRequest, access: Access) -> Response:
    """Refuse a path or a method."""
    path = request.url.path
    methods = [method for method, served, _ in HANDLERS if served == path]
    if methods:
        text = f"{path} takes {methods[0]}, and the request is {request.method}"
        raise ApiError(405, text, code="method_not_allowed")
    served = ", ".join(dict.fromkeys(url for _, url, _ in HANDLERS))
    text = f"{request.method} {path[:100]} is not served; these are: {served}"
    raise ApiError(404, text, code="unknown_url")


async def _called(
    request: HttpRequest, access: Access, wanted: Request, call: Coroutine[Any, Any, _T]
) -> _T:
    """Await a call of the model; cancel it if the client hangs up.

    Raises:
        ApiError: the model cannot be called so.
    """
    _warn_of_unused(wanted.unused)
    access.memory.num_replies += 1
    access.limit = None
    sampling = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_hung_up(request))
    access.running[sampling] = wanted.name
    try:
        await asyncio.wait({sampling, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            access.model.refused["hung_up"] += 1
            sampling.cancel()
        return await sampling
    except (ModelLimit, ValueError) as error:
        access.limit = error if isinstance(error, ModelLimit) else None
        raise _refusal(error) from error
    except (asyncio.CancelledError, EpisodeOver) as error:
        if access.running[sampling] is None:
            raise ApiError(400, "the request was aborted", code="request_aborted") from error
        text = "the episode is over, or the client hung up"
        raise ApiError(401, text, code="invalid_api_key") from error
    finally:
        sampling.cancel()
        gone.cancel()
        del access.running[sampling]


def _refusal(error: ModelLimit | ValueError) -> ApiError:
    codes = {"length": "context_length_exceeded", "turns": "max_turns_exceeded"}
    code = codes[error.limit] if isinstance(error, ModelLimit) else None
    return ApiError(400, str(error), code=code)


async def _hung_up(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: HttpRequest, access: Access) -> dict[str, Any]:
    """Read a JSON object, or read past a body that is larger than any conversation.

    A client that is still writing would not see an earlier reply.
    """
    tokens = access.model.max_tokens_total
    limit = max(_SMALLEST_LIMIT, _BYTES_PER_TOKEN * tokens)
    content, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            content += part
    if size > limit:
        text = f"the body has {size} bytes, and a sequence at most {tokens} tokens ({limit} bytes)"
        raise ApiError(413, text, code="context_length_exceeded")
    try:
        body = read_json(bytes(content))
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _warn_of_unused(names: tuple[str, ...]) -> None:
    if names:
        _say_once(
            f"a request to the endpoint sets {', '.join(names)}, which is not used: calls that are "
            "trained on are sampled as rollout.* says (or eval.* in evaluation), and R3 runs no "
            "tools",
            "unused",
        )


def _say_once(text: str, about: str, *, everywhere: bool = False) -> None:
    """Warn once per run: every rank has an endpoint, and its agents are alike."""
    if about not in _SAID and (everywhere or os.environ.get("RANK", "0") == "0"):
        _SAID.add(about)
        say(f"warning: {text}", error=True)


_SAID: set[str] = set()


def _json(content: Any, status: int = 200) -> Response:
    """A body in ASCII, which can hold half of a character that a model or a client wrote."""
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")


def _waiting(
    request: HttpRequest, called: asyncio.Future[_T], write: Callable[[_T], list[Any]]
) -> Response:
    """The stream of a call that takes long: signs of life, which clients skip, then its events.

    Its status is sent before there is a message, so an error is an event.
    """
    from starlette.responses import StreamingResponse

    is_anthropic = request.url.path.startswith(_ANTHROPIC)
    sign = _events([{"type": "ping"}]) if is_anthropic else ": waiting for the engine\n\n"
    # If the client hangs up, nobody asks for its end any more.
    called.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def events() -> AsyncIterator[str]:
        while not called.done():
            yield sign
            await asyncio.wait({called}, timeout=_SILENT_S)
        try:
            yield _events(write(called.result()))
        except ApiError as error:
            named = {"type": "error"} if request.url.path == _RESPONSES else {}
            yield _events([named | _error(request, error)])

    return StreamingResponse(events(), media_type=_EVENTS)


def _events(parts: list[Any]) -> str:
    """Server-sent events.

    Those with a type have it as their name, and say themselves which one is the last.
    """
    named = [f"event: {part['type']}\n" if "type" in part else "" for part in parts]
    events = [
        f"{name}data: {json.dumps(part)}\n\n" for name, part in zip(named, parts, strict=True)
    ]
    if not any(named):
        events.append("data: [DONE]\n\n")
    return "".join(events)
