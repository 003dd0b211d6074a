"""Human-readable fields of a rollout, for the rows of dumps and evaluations."""

from __future__ import annotations

from typing import Any

from r3.data.conversation import replied
from r3.types import Prompt, Rollout


def readable(rollout: Rollout, prompt: Prompt | None) -> dict[str, Any]:
    """Question, reference answer, whole conversation and rewards per turn, as JSON can hold them.

    Args:
        prompt: the prompt of the rollout; None if it is not known, and then only the messages are.
    """
    opening = prompt.messages if prompt else ()
    messages = rollout.messages or replied(opening, rollout.response)
    facts: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "turn_rewards": list(rollout.turn_rewards),
    }
    if prompt is not None:
        asked = [message["content"] for message in opening if message["role"] == "user"]
        facts |= {"question": asked[-1] if asked else "", "reference": " or ".join(prompt.accepted)}
    return facts
