"""Drives environments by hand: a prompt, a message of the model, the replies."""

import time
from typing import cast

from r3.envs import Environments
from r3.types import Prompt
from r3.user_code import Done


def prompt(name: str = "rows.jsonl:1") -> Prompt:
    """A prompt of one short question."""
    messages = ({"role": "user", "content": "1+1?"},)
    return Prompt(id=name, messages=messages, tokens_T=(1, 2), answer="#### 2")


def said(text: str, finish_reason: str = "stop") -> dict[str, str]:
    """A message of the model as an environment receives it."""
    return {"role": "assistant", "content": text, "finish_reason": finish_reason}


def collect(environments: Environments, count: int) -> dict[int, Done]:
    """Wait for `count` replies; by key."""
    replies: dict[int, Done] = {}
    until = time.monotonic() + 60
    while len(replies) < count:
        assert time.monotonic() < until
        replies |= {cast("int", reply.key): reply for reply in environments.poll(0.5)}
    return replies


def opened(environments: Environments, row: Prompt | None = None) -> Done:
    """Open a conversation, number 0; what its environment says."""
    environments.open(0, row or prompt())
    return collect(environments, 1)[0]


def answered(environments: Environments, text: str) -> Done:
    """Send a message of conversation 0; what its environment says."""
    environments.send(0, said(text))
    return collect(environments, 1)[0]
