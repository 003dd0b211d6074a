"""Settings that hold keyword arguments of a user's code, written as key=value."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_PYTHON_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")  # .5, 1., +3 are no JSON
_LEADING_ZERO = re.compile(r"[-+]?0\d")  # 007 is a text, as in JSON


def argument_value(text: str) -> Any:
    """Read the value of an argument: JSON, or as Python writes it, else the text itself.

    Numbers, `true` or `True`, `null` or `None`, lists and mappings, `"quoted text"`.

    Raises:
        ValueError: the value is no finite number, or a mapping has a key twice.
    """
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(
            text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_each_once
        )
    except json.JSONDecodeError:
        pass
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if _PYTHON_NUMBER.fullmatch(text) and not _LEADING_ZERO.match(text):
        return _finite(text) if set(text) & set(".eE") else int(text)
    if text.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return _finite(text)
    if text.startswith(("[", "{")):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
        if isinstance(found, list | dict):
            return found
    return text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def keyword_arguments(items: Sequence[str]) -> dict[str, Any]:
    """Parse key=value items, of which the last counts if a key comes twice.

    Raises:
        ValueError: as in `argument_value`.
    """
    return {key: argument_value(text) for key, _, text in (item.partition("=") for item in items)}


def arguments_fault(items: Sequence[str]) -> tuple[str, str, str] | None:
    """The first item that has no meaning, the rule that it breaks, and a fix; None without one."""
    values: dict[str, str] = {}
    for item in items:
        key, _, text = item.partition("=")
        if key in values:
            rule = f"{key} is given twice, before as {key}={values[key]}"
            return item, rule, "keep one of the two"
        values[key] = text
        try:
            argument_value(text)
        except ValueError as error:
            return item, str(error), f"""write {key}='"{text}"' if it is a text"""
    return None
