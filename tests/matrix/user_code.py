"""What a user brings: a reward that differs within every group, and an environment with a tool."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def reward(response: str, prompt: object) -> float:
    """A random model is never right; advantages must not be 0."""
    return zlib.crc32(response.encode()) % 16 / 16


class Echo:
    """Two turns, whatever the model says: the reply of a tool between them."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "echo",
                "description": "Say something again.",
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
            },
        },
    )

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: Any) -> Sequence[Any]:
        return prompt.messages  # type: ignore[no-any-return]

    def step(self, message: Any) -> tuple[list[dict[str, str]], float | None, bool]:
        self.turns += 1
        if self.turns == 1:
            return [{"role": "tool", "content": "47"}], None, False
        return [], reward(message["content"], None), True
