"""Names of functions and their keyword arguments: which function of a user gets which argument.

--reward.args bonus=1.0        every function that has a parameter `bonus`
--reward.args f.bonus=1.0      the function that metrics show as `f`
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Names in `reward.function` that stand for the environment's own reward. `none` says that there is
# no other reward function.
ENVIRONMENT = ("env", "none")
JUDGES = ("gym", "math", "http", "self_judge", "model")  # an extra brings them


def reward_names(specs: Sequence[str]) -> list[str]:
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
            text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_refuse_repeats
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
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
        if isinstance(value, list | dict):
            return value
    return text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _refuse_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return mapping


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


def argument_items(values: Mapping[str, Any]) -> list[str]:
    """Write a mapping of YAML or Python as key=value items, which `keyword_arguments` reads back.

    Raises:
        ValueError: a value is none that JSON has.
    """
    items = []
    for key, value in values.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            rule = f"{key} is {kind_of(value)}; use numbers, texts, booleans, lists"
            raise ValueError(rule) from None
        plain = value if isinstance(value, str) else text
        items.append(f"{key}={plain if _is_read_as(plain, value) else text}")
    return items


def _is_read_as(text: str, value: Any) -> bool:
    try:
        parsed = argument_value(text)
    except ValueError:
        return False
    return type(parsed) is type(value) and bool(parsed == value)


@dataclass(frozen=True, kw_only=True)
class Taker:
    """A function or class of a user's file, which may get arguments.

    Attributes:
        name: as NAME.key=value has it.
        signature: None if it is not known: any argument may fit.
        passed: number of parameters that R3 passes by position.
        optional: parameters that R3 passes by keyword.
    """

    name: str
    signature: inspect.Signature | None
    passed: int = 0
    optional: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that an argument may set."""
        if self.signature is None:
            return ()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        rest = list(self.signature.parameters.values())[self.passed :]
        return tuple(
            each.name for each in rest if each.kind in kinds and each.name not in self.optional
        )

    @property
    def is_open(self) -> bool:
        """Whether it takes arguments of any name: it has `**rest`, or is not known."""
        return self.signature is None or any(
            each.kind is inspect.Parameter.VAR_KEYWORD
            for each in self.signature.parameters.values()
        )


def assigned(
    items: Sequence[str], takers: Sequence[Taker]
) -> tuple[list[dict[str, Any]], list[tuple[str, str, str]]]:
    """Give each argument to the functions that have the parameter.

    Functions with `**rest` get an argument that no other function has a parameter for. An item
    NAME.key=value is for the functions of that name alone.

    Returns:
        The keyword arguments of each function, and the items that fit none, each with the rule that
        it breaks and a fix.
    """
    arguments: list[dict[str, Any]] = [{} for _ in takers]
    faults = []
    for item in items:
        key, _, text = item.partition("=")
        owner, _, parameter = key.rpartition(".")
        asked = [i for i, taker in enumerate(takers) if owner in ("", taker.name)]
        fitting = [i for i in asked if parameter in takers[i].parameters]
        fitting = fitting or [i for i in asked if takers[i].is_open]
        for i in fitting:
            arguments[i][parameter] = argument_value(text)
        if not fitting:
            faults.append((item, *_why_unfit(owner, parameter, takers, bool(asked))))
    return arguments, faults


def _why_unfit(
    owner: str, parameter: str, takers: Sequence[Taker], is_known: bool
) -> tuple[str, str]:
    if not takers:
        return "is for a function or class of yours, and none is set", "leave it out"
    taken = (f"{taker.name} takes {', '.join(taker.parameters) or 'none'}" for taker in takers)
    fix = "; ".join(taken)
    if owner and not is_known:
        return f"names {owner}, which is not a function of yours", fix
    who = owner or (takers[0].name if len(takers) == 1 else "no function of yours")
    return f"{who} has {'no' if owner or len(takers) == 1 else 'a'} parameter {parameter!r}", fix
