"""Tool calls in a message of the model, in the format of Hermes and Qwen templates."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """Return `{"name": ..., "arguments": {...}}` of each `<tool_call>` that holds such JSON.

    Calls in another form are left out; the text still has them.
    """
    calls = []
    for content in _CALL.findall(text):
        try:
            call = json.loads(content)
        except ValueError:
            continue
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            continue
        arguments = call.get("arguments", {})
        if isinstance(arguments, dict):
            calls.append({"name": call["name"], "arguments": arguments})
    return calls
