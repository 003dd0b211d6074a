"""Names of reward functions in metrics, dumps and settings; names of types in error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Names in `reward.function` that stand for the environment's own reward. `none` says that there is
# no other reward function.
ENVIRONMENT = ("env", "none")
JUDGES = ("gym", "math", "http", "self_judge", "model")  # an extra brings them


def names_of(specs: Sequence[str]) -> list[str]:
    """Return the names of reward functions in metrics, dumps and `reward.args`.

    The built-in's name or the function's, numbered if two are the same.
    """
    names: list[str] = []
    for spec in specs:
        name = base = "env" if spec in ENVIRONMENT else spec.rpartition(":")[2]
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names


def kind_of(value: Any) -> str:
    """What a value of a file is, to stand behind "is"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "a text", int | float: "a number", list | tuple: "a list", Mapping: "an object"}
    other = f"of type {type(value).__name__}"
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), other)
