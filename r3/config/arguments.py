"""Settings that hold keyword arguments of a user's code, written as key=value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def keyword_arguments(items: Sequence[str]) -> dict[str, Any]:
    """Parse key=value items. A value is JSON (a number, true, false, null, a list), else text."""
    arguments = {}
    for item in items:
        key, _, text = item.partition("=")
        try:
            arguments[key] = json.loads(text)
        except ValueError:
            arguments[key] = text
    return arguments
