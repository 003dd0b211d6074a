"""The table of all settings, read from the annotations of `Config`; values from text or YAML."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from r3.config.arguments import argument_items, arguments_fault
from r3.config.rules import Fix, IsPath, KeyValue, MayChangeOnResume, NoneIsAValue, Rule
from r3.config.settings import Config, flatten
from r3.config.trl_verl import meaning

_Mark = TypeVar("_Mark")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    Attributes:
        field: full name of the setting, or the flag.
        value: its value.
        rule: the rule that the value breaks.
        fix: what to do.
        origin: the preset that set the value, if the user did not.
        is_missing: a file is not there yet, which a run needs and a plan does not.
    """

    field: str
    value: object
    rule: str
    fix: str
    origin: str = ""
    is_missing: bool = False

    def __str__(self) -> str:
        origin = f" (set by {self.origin})" if self.origin else ""
        end = "    " if self.rule.endswith("\n") else ". "  # a rule of several lines
        return f"{self.field} = {self.value!r}{origin}: {self.rule}{end}Fix: {self.fix}"


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)  # what unpickling gives to __init__

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        return "\n".join([f"config: {count}", *(f"  - {problem}" for problem in self.problems)])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as its annotation describes it.

    Attributes:
        name: full name, "section.field".
        kind: its type: str, int, float, bool, a Literal, or a tuple of one of them.
        default: its value in an empty preset.
        rule: the rule that its value, or each value of a list, obeys; None without one.
        fix: what to do when the rule is broken.
        resume: how it may change on resume; None if it may not.
        is_path: `~` and variables of the environment are filled in.
        none_is_a_value: the word none is not the empty text.
    """

    name: str
    kind: Any
    default: Any
    rule: Rule | None
    fix: str
    resume: MayChangeOnResume | None
    is_path: bool = False
    none_is_a_value: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds a text or a list of them."""
        return self.kind in (str, tuple[str, ...])

    @property
    def is_list(self) -> bool:
        """Whether it holds any number of values, written `--name a b` and, in YAML, as a list."""
        return get_origin(self.kind) is tuple

    @property
    def help(self) -> str:
        """What it is, its unit, and what special values mean."""
        section, name = self.name.split(".")
        return _help_texts(section)[name]

    @property
    def type_in_words(self) -> str:
        """Such as text, path, integer, list of number; or the choices."""
        kind = get_args(self.kind)[0] if self.is_list else self.kind
        if get_origin(kind) is Literal:
            return ", ".join(map(str, get_args(kind)))
        text = "path" if self.is_path else "text"
        word = {str: text, int: "integer", float: "number", bool: "true or false"}[kind]
        return f"list of {word}" if self.is_list else word

    @property
    def resume_in_words(self) -> str:
        """Whether a resumed run may change it: yes, no, or "yes, unless ..."."""
        if self.resume is None:
            return "no"
        return f"yes, {self.resume.exception}" if self.resume.exception else "yes"

    def problem(self, value: Any) -> Problem | None:
        """What is wrong with a value of the right type; None if nothing is."""
        values = value if self.is_list else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in values):
            return Problem(self.name, value, "must be a finite number", self.fix)
        if self.rule and not all(map(self.rule.accepts, values)):
            return Problem(self.name, value, str(self.rule), self.fix)
        if isinstance(self.rule, KeyValue) and (fault := arguments_fault(value)):
            return Problem(self.name, *fault)
        return None


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for section, annotated in get_type_hints(Config, include_extras=True).items():
        cls, of_section = _unwrap(annotated)
        hints = get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            kind, marks = _unwrap(hints[field.name])
            fix, resume = _mark_of(Fix, marks), _mark_of(MayChangeOnResume, (*marks, *of_section))
            usual = f"correct it; the default is {as_typed(field.default) or 'empty'}"
            name = f"{section}.{field.name}"
            found[name] = Setting(
                name=name,
                kind=kind,
                default=field.default,
                rule=_mark_of(Rule, marks),
                fix=fix.text if fix else usual,
                resume=resume,
                is_path=_mark_of(IsPath, marks) is not None,
                none_is_a_value=_mark_of(NoneIsAValue, marks) is not None,
            )
    return found


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return kind, tuple(marks)
    return hint, ()


def _mark_of(cls: type[_Mark], marks: Sequence[Any]) -> _Mark | None:
    return next((mark for mark in marks if isinstance(mark, cls)), None)


def as_typed(value: Any) -> str:
    """A value as one writes it on the command line; "" for an empty one."""
    if isinstance(value, list | tuple):
        return " ".join(map(as_typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def shown(value: Any) -> str:
    """A value as one writes it, from its end if it is long; "empty" for none."""
    text = as_typed(value).removeprefix(os.getcwd() + os.sep)
    return (text if len(text) <= 60 else f"...{text[-57:]}") or "empty"


SETTINGS = _settings()
"""Every setting by its full name, "section.field"."""


def read_values(
    given: Mapping[str, Any], problems: list[Problem], notes: list[str]
) -> dict[str, Any]:
    """Settings by their full names, in their types, from sections or full names.

    Args:
        given: `{"train": {"lr": "1e-4"}}` and `{"train.lr": "1e-4"}` are the same.
        problems: gets unknown names, values of a wrong type, and names that come twice.
        notes: gets what is read in another way than it is written.
    """
    values: dict[str, Any] = {}
    for name, value in _by_full_name(given, problems):
        if name not in SETTINGS:
            rule = "there is no such setting"
            problems.append(Problem(name, value, rule, nearest_settings(name)))
        elif name in values:
            rule = "is given twice, in its section and by its full name"
            problems.append(Problem(name, value, rule, "keep one of the two"))
        else:
            try:
                values[name] = parse_value(name, value)
            except ValueError as error:
                problems.append(Problem(name, value, str(error), SETTINGS[name].fix))
            else:
                if SETTINGS[name].is_text and _is_none(value) and not values[name]:
                    notes.append(f"{name} {value}: read as empty, not as the text {str(value)!r}")
    return values


def _by_full_name(given: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Values in sections or by full names, as a dict by full names; anything else is a problem."""
    sections = [section.name for section in fields(Config)]
    for name, content in given.items():
        if "." in str(name):
            yield name, content
        elif name not in sections:
            fix = nearest_settings(str(name))
            if isinstance(content, Mapping):
                fix = f"use one of {', '.join(sections)}"
            problems.append(Problem(str(name), content, "there is no such section", fix))
        elif isinstance(content, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in content.items())
        else:
            fix = f"write {name}: {{setting: value}}"
            problems.append(Problem(name, content, "must map settings to values", fix))


def parse_value(name: str, value: object) -> Any:
    """A value for a setting, from text, YAML or Python, in the type of the setting.

    Text is read as on the command line: "1e-4" is a number. A list setting takes a list, one value
    as a list of one, "" as an empty list, and key=value items also as a mapping. none, null and
    Python's None are the empty text, unless none is a value of the setting. `~`, `$VAR` and
    `${VAR}` in paths are filled in.

    Raises:
        ValueError: the value has another type; the message says what was expected.
    """
    setting = SETTINGS[name]
    if isinstance(setting.rule, KeyValue):  # args: {limit: 3}, and args: [limit: 3]
        given = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, Mapping) for each in given):
            items = (argument_items(one) if isinstance(one, Mapping) else [one] for one in given)
            value = [item for some in items for item in some]
    if setting.is_text and _is_none(value):
        value = "none" if setting.none_is_a_value else ""
    elif setting.none_is_a_value and isinstance(value, list | tuple):
        value = ["none" if _is_none(each) else each for each in value]
    parsed = _parse_as(setting.kind, value)
    if setting.is_path:
        return tuple(map(filled_in, parsed)) if setting.is_list else filled_in(parsed)
    return parsed


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def filled_in(path: str) -> str:
    """A path with `~` and the variables of the environment; one that exists stays as it is.

    Raises:
        ValueError: a variable is not set, or a user has no home folder.
    """
    if not ("$" in path or path.startswith("~")) or os.path.lexists(path):
        return path
    names = [braced or bare for braced, bare in _VARIABLE.findall(path)]
    if unset := [name for name in names if not os.environ.get(name)]:
        raise ValueError(f"names the environment variable {unset[0]}, which is not set")
    if "${" in (found := os.path.expandvars(path)):
        raise ValueError("has a '${' that is not ${VARIABLE}")
    found = os.path.expanduser(found) if path.startswith("~") else found
    if path.startswith("~") and found.startswith("~"):
        raise ValueError(f"begins with {path.partition('/')[0]}, which has no home folder")
    return found


def _parse_as(kind: Any, value: object) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if get_origin(kind) is tuple:
        one = get_args(kind)[0]
        # As in `--eval.path ''`: the way to write no value where a value is expected.
        if value == "":
            return ()
        if not isinstance(value, list | tuple):  # `path: rows.jsonl` is a list of one
            value = (value,)
        return tuple(_parse_as(one, entry) for entry in value)
    if get_origin(kind) is Literal:
        text = "none" if _is_none(value) else str(value)
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError(f"must be one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        text = str(value).lower()
        if text not in ("true", "yes", "on", "false", "no", "off"):
            raise ValueError("must be True or False")
        return text in ("true", "yes", "on")
    accepted, expected = {
        str: ((str,), "text"),
        int: ((int, str), "an integer"),
        float: ((int, float, str), "a number"),
    }[kind]
    if type(value) in accepted:  # not isinstance: True is no number
        with suppress(ValueError):
            return kind(value)
    in_quotes = kind is str and isinstance(value, bool | int | float)  # of YAML or Python
    raise ValueError(f"must be {expected}{': put it in quotes' if in_quotes else ''}")


def nearest_settings(name: str) -> str:
    """Advice for a setting that does not exist: the settings it may mean."""
    section, _, last = name.rpartition(".")
    switched = f"{section}.{last.removeprefix('no_')}"
    if last.startswith("no_") and switched in SETTINGS and SETTINGS[switched].kind is bool:
        return f"write --{switched} False"
    lasts = dict.fromkeys(full.partition(".")[2] for full in SETTINGS)
    if last not in lasts and (ours := meaning(last)):
        return f"did you mean {ours}?" if ours in SETTINGS else f"TRL or verl has it. In R3: {ours}"
    near = difflib.get_close_matches(last, lasts, n=2, cutoff=0.7)
    meant = [full for word in near for full in SETTINGS if full.partition(".")[2] == word]
    meant = [full for full in meant if full.startswith(f"{section}.")] or meant
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    siblings = [full.partition(".")[2] for full in SETTINGS if full.startswith(f"{section}.")]
    return f"{section} has {', '.join(siblings)}" if siblings else "--help lists every setting"


def fixed_changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ although a run may not change them: name -> (value, the run's value).

    Args:
        old: the config the run was started with.
        new: the config it is to be resumed with.
    """
    before, now = flatten(old), flatten(new)
    return {
        name: (now[name], before[name])
        for name, setting in SETTINGS.items()
        if now[name] != before[name] and not (setting.resume and setting.resume.allows(old))
    }


_SHOWN_CHANGES = 12


def other_run(folder: object, changes: Mapping[str, tuple[Any, Any]], fix: str = "") -> Problem:
    """A folder that has another run: what differs, one line each, and what to do."""
    lines = [
        f"      {name} = {now!r} (that run: {before!r})\n"
        for name, (now, before) in list(changes.items())[:_SHOWN_CHANGES]
    ]
    if len(changes) > _SHOWN_CHANGES:
        lines.append(f"      and {len(changes) - _SHOWN_CHANGES} more\n")
    rule = "has a run with other settings, which may not change on resume:\n"
    fix = fix or "set them back to continue that run, or start a new one with another --log.dir"
    return Problem("log.dir", str(folder), rule + "".join(lines), fix)


@cache
def _help_texts(section: str) -> dict[str, str]:
    """The text under each setting of a section."""
    cls = type(getattr(Config(), section))
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef), f"{cls.__name__} is not a class statement"
    texts: dict[str, str] = {}
    for field, below in pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                texts[name] = " ".join(text.split())
    return texts
