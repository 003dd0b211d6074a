"""The endpoint of a workflow's episode, for frameworks that use OpenAI's API."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from r3 import extras
from r3.envs.workflow import Model


def serve(model: Model) -> AbstractAsyncContextManager[Any]:
    """Serve an episode's model while the context is open; call it on the workflows' event loop.

    The context has `base_url` and `api_key`.
    """
    return extras.serve(model)
