"""Check what a call of the model brings: its messages, and how it may sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3.data.conversation import half_character, read_message
from r3.engine import Sampling
from r3.errors import Fault
from r3.types import Message


def plain_message(message: Message, said: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A message as templates take it.

    Args:
        said: what was read in the model's messages, by their text.

    Raises:
        ValueError: it is no message.
    """
    # A message of the model has its calls and its reasoning in the content, as it wrote them:
    # templates that render both would show them twice.
    content, is_reply = message.get("content") or "", message.get("role") == "assistant"
    read = {**said.get(content, {})} if is_reply and isinstance(content, str) else {}
    plain = {key: value for key, value in message.items() if key not in read or value != read[key]}
    try:
        return read_message(plain, of_model=True)
    except Fault as fault:
        raise ValueError(f"a message {fault}") from None


_LARGEST_TOP_K = 2**31 - 1  # vLLM has 32 bits for it
_MOST_STOPS = 64  # vLLM looks for each of them after each token


def sampling_faults(how: Sampling) -> list[str]:
    """Return what the engine would not take. There it would end the run."""
    temperature, top_p, top_k = how.temperature, how.top_p, how.top_k
    rules = {
        "temperature must be a number from 0 to 2": _is_number(temperature)
        and 0 <= temperature <= 2,
        "top_p must be a number above 0, at most 1": _is_number(top_p) and 0 < top_p <= 1,
        f"top_k must be an integer from 0 to {_LARGEST_TOP_K}": type(top_k) is int
        and 0 <= top_k <= _LARGEST_TOP_K,
        f"stop must be at most {_MOST_STOPS} texts, none empty or with half of a character": (
            len(how.stop) <= _MOST_STOPS and all(map(_is_stop, how.stop))
        ),
    }
    return [rule for rule, holds in rules.items() if not holds]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and not half_character(text)
