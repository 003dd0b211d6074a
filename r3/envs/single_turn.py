"""One question, one answer."""

from __future__ import annotations

from collections.abc import Sequence

from r3.types import Message, Prompt


class SingleTurn:
    """The prompt as it is; the reward function judges the answer."""

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """The prompt's own messages."""
        return prompt.messages

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """The first answer is the last."""
        return (), None, True
