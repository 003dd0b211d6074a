"""Copies of the arguments for users' code, and checks of the numbers that it returns.

Environments, workflows, rewards, losses and advantages get copies. If one changes what it was
given, no other call, sample, step or retry sees the change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar, cast

from r3.types import Prompt

T = TypeVar("T")

_UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})


def own_copy(value: T) -> T:
    """Return a copy that shares nothing changeable with the value.

    Mappings become dicts. Tokens of a prompt are not copied: they cannot be changed.
    """
    return cast("T", _copied(value))


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is list:
        return [_copied(each) for each in value]
    if kind is tuple:
        return tuple([_copied(each) for each in value])
    if kind is Prompt:
        return replace(
            value,
            messages=_copied(value.messages),
            metadata=_copied(value.metadata),
            tools=_copied(value.tools),
        )
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def number(value: Any) -> float:
    """Return a number of Python, numpy or torch as a finite float; True and False are 1 and 0.

    Raises:
        ValueError: it is something else, or not finite.
    """
    found = value
    # numpy's and torch's scalars, booleans included; an array of one number is none.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        found = value.item()
    if not isinstance(found, Real | Decimal):
        raise ValueError(f"{value!r}, not a number")
    try:
        is_finite = math.isfinite(found)
    except OverflowError:  # an integer beyond all floats
        is_finite = False
    if not is_finite:
        raise ValueError(f"{value}, not a finite number")
    return float(found)


def flag(value: Any) -> bool:
    """Return True, False, 1 or 0, also of numpy and torch, as a bool.

    Raises:
        ValueError: it is something else: a text such as "false" would count as true.
    """
    found = number(value)
    if found not in (0.0, 1.0):
        raise ValueError(f"{value!r}, neither True nor False")
    return bool(found)
