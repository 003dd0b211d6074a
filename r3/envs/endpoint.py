"""Serve the policy over OpenAI's API, for agents in other processes, languages and frameworks.

    async def run(self, task, model):
        async with serve(model) as access:     # access.base_url, access.api_key
            ...

Each engine's leader rank serves on the event loop of the workflows, at `env.listen`: by default on
loopback, at a free port. A bearer token belongs to one episode: requests with it are calls of that
episode's model, and requests without one are refused, whatever the address.
Starlette and uvicorn, which vLLM installs, are imported when the first episode is served.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from r3.data.conversation import read_json
from r3.envs.openai_api import (
    MODEL_ENTRY,
    ApiError,
    Memory,
    Request,
    chat_reply,
    chat_request,
    check_model,
    completion_reply,
    completion_request,
    tokens_reply,
    tokens_request,
)
from r3.envs.workflow import EpisodeOver, Model, ModelLimit
from r3.runtime.terminal import say

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_T = TypeVar("_T")
# Clients keep connections while their agent computes; one closed beneath a request is an error.
_KEEP_ALIVE_S = 86400
# A token of text has three or four characters, each at most six bytes of JSON.
_BYTES_PER_TOKEN = 256
_SMALLEST_LIMIT = 1 << 20


@dataclass(kw_only=True, slots=True)
class Access:
    """What one episode's agent needs.

    Attributes:
        base_url: for OPENAI_BASE_URL.
        api_key: for OPENAI_API_KEY; valid until the episode is over.
        limit: the limit that the last request met; None if it met none.
    """

    model: Model
    base_url: str
    api_key: str
    limit: ModelLimit | None = None
    memory: Memory = field(default_factory=Memory)


@asynccontextmanager
async def serve(model: Model) -> AsyncIterator[Access]:
    """Serve an episode's model while the context is open; call it on the workflows' event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _ENDPOINTS:
        _ENDPOINTS[loop] = Endpoint(*model.address)
    endpoint = _ENDPOINTS[loop]
    await endpoint.started()
    key = f"r3-{secrets.token_urlsafe(24)}"
    access = Access(model=model, base_url=endpoint.base_url, api_key=key)
    endpoint.episodes[key] = access
    try:
        yield access
    finally:
        del endpoint.episodes[key]


class Endpoint:
    """The server of one event loop; it ends with the loop.

    Attributes:
        base_url: its address.
        episodes: what bearer tokens belong to.
    """

    def __init__(self, listen: str, advertise: str) -> None:
        """Bind the address; see `env.listen` and `env.advertise`.

        Raises:
            OSError: it is no address of this machine, or its port is taken.
        """
        self.episodes: dict[str, Access] = {}
        self._socket = _bound(listen)
        port = self._socket.getsockname()[1]
        self.base_url = f"http://{host_of(listen, advertise)}:{port}/v1"
        self._is_up = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def started(self) -> None:
        """Wait until requests are taken.

        Raises:
            ImportError: Starlette or uvicorn is missing.
        """
        up = asyncio.ensure_future(self._is_up.wait())
        await asyncio.wait({up, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            up.cancel()
            self._task.result()

    async def _serve(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._answering(_chat), methods=["POST"]),
            Route("/v1/completions", self._answering(_complete), methods=["POST"]),
            Route("/inference/v1/generate", self._answering(_generate), methods=["POST"]),
            Route("/v1/models", self._answering(_models), methods=["GET"]),
            Route("/v1/models/{name}", self._answering(_models), methods=["GET"]),
            Route("/{path:path}", self._answering(_nothing), methods=["GET", "POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={Exception: _failed}),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        server = uvicorn.Server(config)
        self._is_up.set()  # the socket listens: earlier requests wait in its queue
        try:
            await server.serve(sockets=[self._socket])
        finally:
            for each in getattr(server, "servers", []):
                each.close()
            self._socket.close()

    def _answering(
        self, handle: Callable[[HttpRequest, Access], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Check the token, and turn errors into those of the API."""

        async def answer(request: HttpRequest) -> Response:
            from starlette.requests import ClientDisconnect

            kind, _, key = request.headers.get("authorization", "").partition(" ")
            access = self.episodes.get(key) if kind.lower() == "bearer" else None
            try:
                if access is None:
                    text = "the token belongs to no episode, or its episode is over"
                    raise ApiError(401, text, code="invalid_api_key")
                return await handle(request, access)
            except ApiError as error:
                if access and error.__cause__ is None:  # else the model has refused and counted it
                    access.model.refused["invalid"] += 1
                return _json(error.body, error.status)
            except ClientDisconnect:  # in the middle of the body; nobody reads the reply
                assert access is not None
                access.model.refused["hung_up"] += 1
                return _json({}, 400)

        return answer


def host_of(listen: str, advertise: str) -> str:
    """Return the host of the URL that agents are given."""
    host = _split(listen)[0]
    every = host in ("0.0.0.0", "[::]")
    return advertise or (socket.gethostname() if every else host)


def _split(listen: str) -> tuple[str, int]:
    """Return host and port of `env.listen`; port 0 is any free one."""
    host, colon, port = listen.rpartition(":")
    if not colon or listen.endswith("]"):
        return listen, 0
    return host, int(port)


def _bound(listen: str) -> socket.socket:
    host, port = _split(listen)
    port += int(os.environ.get("LOCAL_RANK", "0")) if port else 0
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        text = f"env.listen = {listen!r}: the endpoint cannot listen at port {port}: {error}"
        raise OSError(text) from error


async def _chat(request: HttpRequest, access: Access) -> Response:
    wanted = chat_request(await _body(request, access), access.memory)
    message = await _called(request, access, wanted, access.model.chat(**wanted.arguments))
    return _reply(chat_reply(message, wanted, access.memory, access.model), wanted)


async def _complete(request: HttpRequest, access: Access) -> Response:
    wanted = completion_request(await _body(request, access))
    completion = await _called(request, access, wanted, access.model.complete(**wanted.arguments))
    return _reply(completion_reply(completion, wanted, access.memory, access.model), wanted)


async def _generate(request: HttpRequest, access: Access) -> Response:
    wanted = tokens_request(await _body(request, access))
    completion = await _called(request, access, wanted, access.model.complete(**wanted.arguments))
    return _reply(tokens_reply(completion, wanted, access.memory, access.model), wanted)


async def _models(request: HttpRequest, access: Access) -> Response:
    entry = MODEL_ENTRY | {"max_model_len": access.model.max_tokens_total}  # vLLM's name for it
    if "name" not in request.path_params:
        return _json({"object": "list", "data": [entry]})
    check_model(request.path_params["name"])
    return _json(entry)


async def _nothing(request: HttpRequest, access: Access) -> Response:
    text = (
        f"{request.method} {request.url.path} is not served; /v1/chat/completions, "
        "/v1/completions, /v1/models and /inference/v1/generate are"
    )
    raise ApiError(404, text, code="unknown_url")


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


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
    try:
        await asyncio.wait({sampling, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            access.model.refused["hung_up"] += 1
            sampling.cancel()
        return await sampling
    except ModelLimit as limit:
        access.limit = limit
        code = "context_length_exceeded" if limit.limit == "length" else "max_turns_exceeded"
        raise ApiError(400, str(limit), code=code) from limit
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    except (asyncio.CancelledError, EpisodeOver) as error:
        text = "the episode is over, or the client hung up"
        raise ApiError(401, text, code="invalid_api_key") from error
    finally:
        sampling.cancel()
        gone.cancel()


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
    """Warn once per run: every rank has an endpoint, and its agents are alike."""
    if names and not _WARNED and os.environ.get("RANK", "0") == "0":
        _WARNED.add(names)
        say(
            f"warning: a request to the endpoint sets {', '.join(names)}, which is not used: calls "
            "that are trained on are sampled as rollout.* says (or eval.* in evaluation)",
            error=True,
        )


_WARNED: set[tuple[str, ...]] = set()


async def _failed(request: HttpRequest, error: Exception) -> Response:
    """The API's shape for an error that nobody expected; the server prints its traceback."""
    return _json(ApiError(500, f"{type(error).__name__}: {error}").body, 500)


def _json(content: Any, status: int = 200) -> Response:
    """A body in ASCII, which can hold half of a character that a model or a client wrote."""
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")


def _reply(parts: list[Any], wanted: Request) -> Response:
    """One JSON body, or server-sent events: the whole message is sampled before the first one."""
    from starlette.responses import Response

    if not wanted.stream:
        return _json(parts[0])
    events = [*map(json.dumps, parts), "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    return Response(text, media_type="text/event-stream")
