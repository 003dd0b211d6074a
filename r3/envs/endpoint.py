"""Serve the policy over OpenAI's and Anthropic's APIs, for agents of any language and framework.

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
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from r3.envs.apis.common import ApiError
from r3.envs.apis.handlers import HANDLERS, Access, Handler, answered, error_reply, not_served
from r3.envs.workflow import Model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

# Clients keep connections while their agent computes; one closed beneath a request is an error.
_KEEP_ALIVE_S = 86400


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
        from starlette.exceptions import HTTPException
        from starlette.responses import Response
        from starlette.routing import Route

        def route(path: str, handle: Handler, *methods: str) -> Route:
            async def answer(request: HttpRequest) -> Response:
                return await answered(request, self._access(request), handle)

            return Route(path, answer, methods=methods)

        async def failed(request: HttpRequest, error: Exception) -> Response:
            # One that nobody expected; the server prints its traceback.
            text = f"{type(error).__name__}: {error}"
            return error_reply(request, ApiError(500, text))

        async def alive(request: HttpRequest) -> Response:
            return Response()  # to anybody: clients look whether there is a server

        async def odd(request: HttpRequest, error: Exception) -> Response:
            return await answered(request, self._access(request), not_served)

        config = uvicorn.Config(
            Starlette(
                routes=[
                    *(Route(path, alive, methods=["GET"]) for path in ("/", "/health")),
                    *(route(path, handle, method) for method, path, handle in HANDLERS),
                ],
                exception_handlers={Exception: failed, HTTPException: odd},
            ),
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
            for listener in getattr(server, "servers", []):
                listener.close()
            self._socket.close()

    def _access(self, request: HttpRequest) -> Access | None:
        """What the token of a request belongs to; Anthropic's clients have a header for it."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        episode = self.episodes.get(key) if kind.lower() == "bearer" else None
        return episode or self.episodes.get(request.headers.get("x-api-key", ""))


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
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        text = f"env.listen = {listen!r}: the endpoint cannot listen at port {port}: {error}"
        raise OSError(text) from error


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()
