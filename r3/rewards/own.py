"""Call a user's reward function, and check what it returns.

Worker processes import this module first, so it imports no settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3.rewards import Score, checked_group, checked_score
from r3.types import Prompt
from r3.user_code.calls import awaited
from r3.user_code.loading import load
from r3.user_code.values import own_copy


@dataclass(frozen=True, slots=True)
class Own:
    """A user's function, or its path in worker processes, which have loaded its file already."""

    function: Callable[..., Any] | str
    arguments: dict[str, Any]
    of_group: bool

    def call(self, response: Any, prompt: Prompt, *messages: Any) -> Any:
        value = self._started(response, prompt, messages)
        return self._checked(awaited(value), response)

    async def call_async(self, response: Any, prompt: Prompt, *messages: Any) -> Any:
        return self._checked(await self._started(response, prompt, messages), response)

    def _started(self, response: Any, prompt: Prompt, messages: tuple[Any, ...]) -> Any:
        """Call the function with copies: it may change what it gets."""
        function = load(self.function) if isinstance(self.function, str) else self.function
        named = {"messages": messages[0]} if messages else {}
        return function(own_copy(response), own_copy(prompt), **own_copy(self.arguments | named))

    def _checked(self, value: Any, response: Any) -> Score | tuple[Score, ...]:
        """Check the value of one response, or those of a group's list of responses."""
        return checked_group(value, len(response)) if self.of_group else checked_score(value)
