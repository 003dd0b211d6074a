"""One question, one response."""

from __future__ import annotations

from collections.abc import Sequence

from r3.types import Message, Prompt


class SingleTurn:
    """The prompt as it is; reward functions score the response."""

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return the prompt's own messages."""
        return prompt.messages

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """End the conversation after the first response."""
        return (), None, True
